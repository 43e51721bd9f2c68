"""How far from float64 is the sum of A microbatch gradients, by the type of the accumulator?"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_accum as ja
from benchmarks._machine import Limits
from benchmarks._result import Claim, Plot, Result, Table


class Keep:
    """An inner optimizer that does nothing but show the gradient it was given."""

    def __init__(self) -> None:
        self.tx = optax.GradientTransformation(
            lambda params: jax.tree.map(jnp.zeros_like, params), lambda g, s, p=None: (g, g)
        )


def gradients(a: int, size: int, dtype: Any) -> np.ndarray:
    """`[A, size]`: a direction common to all microbatches, and as much noise again."""
    rng = np.random.default_rng(0)
    signal = rng.normal(size=size)
    return (signal + rng.normal(size=(a, size))).astype(np.float32).astype(dtype)


def error(got: Any, want: np.ndarray) -> float:
    """Relative L2 distance."""
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def accumulated(grads: np.ndarray, compensated: bool) -> jax.Array:
    """What an inner optimizer sees of float32 parameters."""
    a, size = grads.shape
    opt = ja.MultiSteps(Keep().tx, a, compensated=compensated)
    params = jnp.zeros(size, jnp.float32)

    @jax.jit
    def run(grads: jax.Array) -> jax.Array:
        def body(carry: Any, g: jax.Array) -> tuple[Any, None]:
            params, state = carry
            return opt.apply(g, state, params), None

        (_, state), _ = jax.lax.scan(body, (params, opt.init(params)), grads)
        return state.inner_opt_state

    return run(jnp.asarray(grads))


def narrow_mean(grads: np.ndarray) -> jax.Array:
    """A running sum in the gradient's own type, as a loop that adds to `.grad` keeps it."""

    @jax.jit
    def run(grads: jax.Array) -> jax.Array:
        total, _ = jax.lax.scan(lambda acc, g: (acc + g, None), jnp.zeros_like(grads[0]), grads)
        return total.astype(jnp.float32) / grads.shape[0]

    return run(jnp.asarray(grads))


def training(a: int, updates: int) -> dict[str, list[tuple[float, float]]]:
    """Loss of a linear regression whose microbatch gradients are bfloat16, by accumulator."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(a, 8, 32)), jnp.float32)
    target = jnp.asarray(rng.normal(size=32), jnp.float32)
    y = x @ target

    def loss(w: jax.Array) -> jax.Array:
        return jnp.mean((x @ w - y) ** 2)

    @jax.jit
    def one(w: jax.Array, narrow: jax.Array) -> jax.Array:
        def grad(part: Any) -> jax.Array:
            xs, ys = part
            return jax.grad(lambda w: jnp.mean((xs @ w - ys) ** 2))(w).astype(jnp.bfloat16)

        def body(acc: Any, part: Any) -> tuple[Any, None]:
            g = grad(part)
            return (acc[0] + g, acc[1] + g.astype(jnp.float32)), None

        zero = (jnp.zeros(32, jnp.bfloat16), jnp.zeros(32, jnp.float32))
        (short, long), _ = jax.lax.scan(body, zero, (x, y))
        return w - 0.1 * jnp.where(narrow, short.astype(jnp.float32), long) / a

    curves = {}
    for name, narrow in (("bfloat16 accumulator", True), ("float32 accumulator", False)):
        w, curve = jnp.zeros(32), []
        for update in range(updates):
            curve.append((update + 1.0, float(loss(w))))
            w = one(w, jnp.asarray(narrow))
        curves[name] = curve
    return curves


def run(*, quick: bool = False, full: bool = False, limits: Limits | None = None) -> Result:
    """The benchmark."""
    del full, limits
    result = Result("precision", __doc__ or "")
    counts = [16, 64] if quick else [16, 64, 256, 1024, 4096]
    size = 256 if quick else 2048
    result.configuration = {"entries": size}
    rows: list[list[Any]] = []
    curves: dict[str, list[tuple[float, float]]] = {}
    for a in counts:
        f32, bf16 = gradients(a, size, np.float32), gradients(a, size, jnp.bfloat16)
        want = f32.astype(np.float64).mean(axis=0)
        found = {
            "float32": error(accumulated(f32, False), want),
            "float32, compensated": error(accumulated(f32, True), want),
            "bfloat16 gradients, float32 accumulator": error(accumulated(bf16, False), want),
            "bfloat16 gradients, bfloat16 accumulator": error(narrow_mean(bf16), want),
        }
        for name, value in found.items():
            result.exact(f"A={a}/{name}", value, "relative L2")
            curves.setdefault(name, []).append((a, value))
        rows.append([a, *found.values()])
    result.tables.append(
        Table(
            "Relative L2 error against float64", ["A", *curves], [[str(r[0]), *r[1:]] for r in rows]
        )
    )
    result.plots.append(
        Plot("Error by accumulator", "microbatches A", "relative L2 error", curves, log_y=True)
    )
    curves = training(64 if quick else 1024, 5 if quick else 60)
    for name, points in curves.items():
        result.exact(f"training/final loss, {name}", points[-1][1], "loss")
    result.plots.append(
        Plot("A training run by accumulator", "updates", "loss", curves, log_x=False, log_y=True)
    )
    result.claims.append(
        Claim(
            "float32 sums stay within 1e-6 of float64",
            f"A={counts[-1]}/float32",
            1e-6 if quick else 2e-6,
        )
    )
    result.claims.append(
        Claim(
            "with compensation the error does not grow with A",
            f"A={counts[-1]}/float32, compensated",
            1e-7,
        )
    )
    return result
