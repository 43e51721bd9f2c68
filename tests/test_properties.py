"""Property: any sequence of calls of `MultiSteps` gives what a float64 model of groups gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings

import jax_accum as ja
from tests._oracle import Oracle

F32, BF16, F16, C64 = jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64
REJECTED = 64.0  # a first entry this large is turned away where a configuration rejects any


def witness() -> optax.GradientTransformation:
    """Hands out the gradient's negative, and remembers the gradient and how often it was asked."""

    def init(params):
        wide = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, F32)), params)
        return {"seen": wide, "asked": jnp.zeros((), jnp.int32)}

    def update(grads, state, params=None):
        seen = jax.tree.map(lambda g, old: g.astype(old.dtype), grads, state["seen"])
        return jax.tree.map(jnp.negative, grads), {"seen": seen, "asked": state["asked"] + 1}

    return optax.GradientTransformation(init, update)


def too_large(grads, gradient_step, params):
    return jnp.real(grads["a"][0]).astype(F32) >= REJECTED, ()


def two_then_three(updates: Any) -> Any:
    return 2 + updates % 2


@dataclass
class Config:
    """A `MultiSteps` and how the property calls it; compiled functions are made once."""

    k: Any
    in_place: bool
    weighted: bool = True
    flush: str = "traced"
    dtypes: tuple = (F32, F32, F32)
    params: tuple = (F32, F32, F32)
    guarded: bool = False
    options: dict = field(default_factory=dict)

    @cached_property
    def opt(self) -> ja.MultiSteps:
        inner = ja.guard(witness()) if self.guarded else witness()
        return ja.MultiSteps(inner, self.k, **self.options)

    @cached_property
    def call(self):
        def call(params, state, grads, weight, examples, flush):
            kwargs = {"weight": weight, "examples": examples, "flush": flush}
            if self.in_place:
                return self.opt.apply(grads, state, params, **kwargs)
            updates, state = self.opt.update(grads, state, params, **kwargs)
            return updates, state

        static = () if self.flush == "traced" else ("flush",)
        return jax.jit(call, static_argnames=static)

    @cached_property
    def oracle(self):
        rejects = "should_skip_update_fn" in self.options
        return lambda: Oracle(
            self.k if callable(self.k) else lambda updates: self.k,
            normalise=self.options.get("use_grad_mean", True),
            scale=self.options.get("loss_reduction", "mean") == "mean",
            guarded=self.guarded,
            rejects=lambda g: rejects and bool(g[0].ravel()[0].real >= REJECTED),
        )


CONFIGS = {
    "three microbatches, update": Config(3, False),
    "a schedule, apply, flush known to Python": Config(two_then_three, True, flush="python"),
    "groups of one, apply": Config(1, True),
    "groups of one, plain sums": Config(1, False, options={"use_grad_mean": False}),
    "no weights": Config(3, False, weighted=False),
    "no weights, plain sums, bfloat16 gradients": Config(
        2, True, weighted=False, dtypes=(BF16, F32, F16), options={"use_grad_mean": False}
    ),
    "gradients of sums": Config(3, True, options={"loss_reduction": "sum"}),
    "plain sums of weighted gradients": Config(2, False, options={"use_grad_mean": False}),
    "compensated, narrow gradients": Config(
        4, True, dtypes=(BF16, F16, F32), params=(F32, F16, BF16), options={"compensated": True}
    ),
    "some rejected": Config(3, False, options={"should_skip_update_fn": too_large}),
    "some rejected, groups of one": Config(1, True, options={"should_skip_update_fn": too_large}),
    "complex": Config(2, True, dtypes=(C64, F32, C64), params=(C64, F32, C64)),
    "guarded, apply": Config(2, True, guarded=True),
    "guarded, update": Config(two_then_three, False, guarded=True),
}

CALL = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["gradient"] * 6 + ["none", "nan", "inf", "large"]),
        "weight": st.sampled_from([0, 1, 1, 2, 3, 0.5, 1536]),
        "examples": st.integers(0, 5),
        "flush": st.sampled_from([False] * 4 + [True]),
        "seed": st.integers(0, 2**16),
    }
)


def gradients(config: Config, call: dict) -> dict | None:
    """A tree of small dyadic fractions, so that casts lose nothing before the sum."""
    if call["kind"] == "none":
        return None
    rng = np.random.default_rng(call["seed"])
    leaves = [rng.integers(-32, 32, shape) / 8 for shape in ((3,), (), (2, 1))]
    if call["kind"] == "large":
        leaves[0][0] = REJECTED
    bad = {"nan": np.nan, "inf": np.inf}.get(call["kind"])
    if bad is not None:
        leaves[2][1, 0] = bad
    a, b, c = (
        jnp.asarray(x + 1j * rng.integers(-8, 8) if d == C64 else x).astype(d)
        for x, d in zip(leaves, config.dtypes, strict=True)
    )
    return {"a": a, "nothing": None, "rest": [b, c]}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the model's own inf - inf
@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(calls=st.lists(CALL, min_size=1, max_size=10))
def test_any_sequence_of_calls_gives_what_the_model_of_groups_gives(name, calls):
    config = CONFIGS[name]
    shapes = ((3,), (), (2, 1))
    a, b, c = (jnp.full(s, 2, d) for s, d in zip(shapes, config.params, strict=True))
    params = {"a": a, "nothing": None, "rest": [b, c]}
    state, oracle = config.opt.init(params), config.oracle()

    for call in calls:
        grads = gradients(config, call)
        weight = float(call["weight"]) if config.weighted else None
        wide = None if grads is None else [np.asarray(g, complex) for g in jax.tree.leaves(grads)]
        want = oracle.call(wide, weight, call["examples"], call["flush"])

        traced_weight = None if weight is None else jnp.asarray(weight, F32)
        flush = jnp.asarray(call["flush"]) if config.flush == "traced" else call["flush"]
        out, state = config.call(
            params, state, grads, traced_weight, jnp.asarray(call["examples"]), flush=flush
        )

        assert bool(config.opt.has_updated(state)) == oracle.updated
        assert int(state.gradient_step) == oracle.counts["updates"]
        assert int(state.mini_step) == len(oracle.group)
        assert ja.counts(state) == oracle.counts_now()
        inner = state.inner_opt_state.inner_state if config.guarded else state.inner_opt_state
        assert int(inner["asked"]) == oracle.counts["updates"]

        if want is None:
            still = params if config.in_place else jax.tree.map(jnp.zeros_like, params)
            assert_bitwise(out, still)
        else:
            dtypes = [
                jnp.promote_types(g, p) for g, p in zip(config.dtypes, config.params, strict=True)
            ]
            seen = jax.tree.leaves(inner["seen"])
            for got, expected, bound, dtype in zip(seen, *want, dtypes, strict=True):
                assert_within(got, expected, bound, dtype, abs(expected))
            before = [np.asarray(p, complex) for p in jax.tree.leaves(params)]
            if not config.in_place:
                before = [np.zeros_like(p) for p in before]
            for got, p, g, bound in zip(jax.tree.leaves(out), before, *want, strict=True):
                assert_within(got, p - g, bound, got.dtype, abs(p) + abs(g))
        if config.in_place:
            params = out


def assert_bitwise(got: Any, want: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def assert_within(
    got: jax.Array, want: np.ndarray, bound: np.ndarray, dtype: Any, size: np.ndarray
) -> None:
    """`got` is as near as a sum in float32 can be, and roundings of that `size` to `dtype`."""
    got = np.asarray(got).astype(complex)
    bad = ~np.isfinite(want)
    assert (np.isfinite(got) == ~bad).all()
    room = float(jnp.finfo(F32).eps) * bound + float(jnp.finfo(dtype).eps) * size
    assert (abs(got - want)[~bad] <= room[~bad]).all(), (got, want)
