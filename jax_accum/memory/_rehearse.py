"""A rehearsal: allocate what a program will need, and give it back."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_accum.memory._analyze import Analysis


def rehearse(needs: Analysis) -> None:
    """Allocates on every local device what a program needs beside its arguments, and frees it.

    In two pieces, as the program will: temporary memory, and results that take no donated buffer.

    Raises:
      jax.errors.JaxRuntimeError: memory ran out.
    """
    sizes = [n for n in (needs.temporary, needs.outputs - needs.aliased) if n > 0]
    held = []
    try:
        for device in jax.local_devices():
            with jax.default_device(device):
                held += [jnp.zeros(n, jnp.uint8) for n in sizes]
        jax.block_until_ready(held)
    finally:
        for x in held:
            x.delete()
