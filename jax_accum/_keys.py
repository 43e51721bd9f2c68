"""example_keys: randomness that belongs to an example, whichever microbatch it falls into."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def example_keys(key: jax.Array, ids: Any) -> jax.Array:
    """A random key for each example, from its ID.

    With a key per microbatch, a mask of dropout depends on how the examples were cut. With a
    key per example it does not, so that the gradient is the same for every partition. Fold
    the number of the update into `key` first, or every update draws the same masks:

        keys = ja.example_keys(jax.random.fold_in(key, update), batch["ids"])
        keep = jax.vmap(lambda k: jax.random.bernoulli(k, 0.9, (width,)))(keys)

    Args:
      key: a key, as `jax.random.key` or `jax.random.PRNGKey` makes it; scalar.
      ids: integer, any shape. NumPy arrays and Python integers count with all of their 64
        bits, without 64-bit mode too; two's complement, so that -1 is one of them.

    Returns:
      Keys, of the shape of `ids`; with a key of `PRNGKey`, uint32 of that shape and one axis.

    Raises:
      TypeError: `ids` is not of an integer type, or `key` is not a key.
      ValueError: `key` is more than one key.

    Example:
      >>> import jax, numpy as np, jax_accum as ja
      >>> keys = ja.example_keys(jax.random.key(0), np.array([7, 2**40 + 7, 7]))
      >>> keys.shape, bool(keys[0] == keys[2]), bool(keys[0] == keys[1])
      ((3,), True, False)
    """
    typed = hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed and getattr(key, "dtype", None) != jnp.uint32:
        raise TypeError(f"key must be a key made by jax.random.key, got {type(key).__name__}.")
    keys = key if typed else jax.random.wrap_key_data(key)
    if keys.shape != ():
        raise ValueError(f"key must be one key, got keys of shape {keys.shape}.")
    low, high = _words(ids)
    fold = jax.random.fold_in
    flat = jax.vmap(lambda a, b: fold(fold(keys, a), b))(low.ravel(), high.ravel())
    result = flat.reshape(low.shape)
    return result if typed else jax.random.key_data(result)


def _words(ids: Any) -> tuple[jax.Array, jax.Array]:
    """The low and the high 32 bits of 64-bit integers; of narrower ones, the sign goes on."""
    if not isinstance(ids, jax.Array):
        ids = np.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(
            f"ids must be integers, one per example, got dtype {ids.dtype}. Number the examples, "
            "or hash their names to 64 bits."
        )
    if isinstance(ids, np.ndarray):
        wide = ids.astype(np.int64) if ids.dtype != np.uint64 else ids.view(np.int64)
        low = (wide & 0xFFFFFFFF).astype(np.uint32)
        return jnp.asarray(low), jnp.asarray(((wide >> 32) & 0xFFFFFFFF).astype(np.uint32))
    low = ids.astype(jnp.uint32)
    if ids.dtype.itemsize == 8:
        return low, (ids >> 32).astype(jnp.uint32)
    negative = ids < 0
    return low, jnp.where(negative, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
