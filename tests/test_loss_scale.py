"""The dynamic loss scale: PyTorch's rule, and the arguments it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_accum as ja

TREE = {"w": jnp.ones(2)}


def reference(initial, growth_interval, factor, attempts):
    """The rule of `torch.amp.GradScaler`, in plain Python: the scale after each attempt."""
    scale, tracker, scales = initial, 0, []
    for finite in attempts:
        if not finite:
            scale, tracker = scale / factor, 0
        else:
            tracker += 1
            if tracker == growth_interval:
                if scale * factor <= float(np.finfo(np.float32).max):
                    scale *= factor
                tracker = 0
        scales.append(scale)
    return scales


@pytest.mark.parametrize(
    ("initial", "interval", "factor", "attempts"),
    [
        (8.0, 2, 2.0, "yyyyny yynyyyy".replace(" ", "")),
        (8.0, 1, 4.0, "ynyny"),
        (1024.0, 3, 2.0, "yynyyynnnyyyyyy"),
        (2.0**126, 1, 2.0, "yyyny"),
    ],
    ids=["every second", "every one", "every third", "at the largest float32"],
)
def test_growth_and_back_off_are_those_of_gradscaler(initial, interval, factor, attempts):
    finite = [c == "y" for c in attempts]
    rule = ja.DynamicLossScale(initial, interval, factor)
    tx = ja.guard(optax.sgd(0.1), loss_scale=rule)
    state, got = tx.init(TREE), []
    update = jax.jit(tx.update)
    for ok in finite:
        _, state = update({"w": jnp.full(2, 1.0 if ok else jnp.inf)}, state)
        got.append(float(ja.loss_scale(state)))
    assert got == reference(initial, interval, factor, finite)


def test_the_scale_never_leaves_minimum_and_maximum():
    tx = ja.guard(
        optax.sgd(0.1),
        loss_scale=ja.DynamicLossScale(4.0, growth_interval=1, minimum=2.0, maximum=12.0),
    )
    state, got = tx.init(TREE), []
    for bad in (False, False, True, True, True, False):
        _, state = tx.update({"w": jnp.full(2, jnp.nan if bad else 1.0)}, state)
        got.append(float(ja.loss_scale(state)))
    assert got == [8.0, 8.0, 4.0, 2.0, 2.0, 4.0]


def test_the_scale_backs_off_after_the_group_that_overflowed_and_is_constant_inside_each():
    tx = ja.guard(optax.sgd(1.0), loss_scale=ja.DynamicLossScale(8.0))
    opt = ja.MultiSteps(tx, 2)
    params, state = {"w": jnp.ones(2)}, opt.init(TREE)
    scales = []
    for overflows in (True, False, False, False):
        scale = ja.loss_scale(state)
        scales.append(float(scale))
        grads = {"w": jnp.full(2, jnp.inf) if overflows else jnp.full(2, 0.25) * scale}
        params, state = opt.apply(grads, state, params)
        if len(scales) == 2:
            np.testing.assert_array_equal(params["w"], 1.0)
    assert scales == [8.0, 8.0, 4.0, 4.0]
    np.testing.assert_array_equal(params["w"], 0.75)


def test_the_inner_optimizer_sees_the_gradient_without_the_scale_even_below_float16():
    keeps = optax.GradientTransformation(
        lambda params: jnp.zeros(2), lambda updates, state, params=None: (updates, updates["w"])
    )
    tx = ja.guard(keeps, loss_scale=ja.DynamicLossScale(2.0**15))
    params = {"w": jnp.ones(2, jnp.float16)}
    updates, state = tx.update({"w": jnp.full(2, 2.0**-14, jnp.float16)}, tx.init(params), params)
    np.testing.assert_array_equal(state.inner_state, 2.0**-29)
    assert updates["w"].dtype == jnp.float16


def test_an_attempt_without_weight_moves_nothing():
    tx = ja.guard(optax.sgd(0.1), loss_scale=ja.DynamicLossScale(8.0, growth_interval=1))
    _, state = tx.update({"w": jnp.full(2, jnp.nan)}, tx.init(TREE), weight=0)
    assert float(ja.loss_scale(state)) == 8.0


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: optax.chain(optax.clip(1.0), tx),
        lambda tx: ja.MultiSteps(optax.chain(optax.identity(), tx), 2),
        lambda tx: optax.masked(tx, {"w": True}),
        lambda tx: optax.apply_if_finite(tx, 3),
    ],
    ids=["chain", "MultiSteps of chain", "masked", "apply_if_finite"],
)
def test_the_scale_is_found_anywhere_in_a_state(around):
    tx = around(ja.guard(optax.sgd(0.1), loss_scale=ja.DynamicLossScale(32.0)))
    assert float(ja.loss_scale(tx.init(TREE))) == 32.0


def test_no_scale_and_two_scales_are_errors():
    one = ja.guard(optax.sgd(0.1), loss_scale=ja.DynamicLossScale())
    with pytest.raises(ValueError, match="holds 0 loss scales"):
        ja.loss_scale(optax.sgd(0.1).init(TREE))
    with pytest.raises(ValueError, match="holds 2 loss scales"):
        ja.loss_scale(optax.chain(one, one).init(TREE))


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"factor": 1.0}, ValueError, "factor must be above 1"),
        ({"factor": float("inf")}, ValueError, "factor must be above 1 and finite"),
        ({"initial": 0.0}, ValueError, "want 0 < minimum <= initial"),
        ({"initial": float("nan")}, ValueError, "want 0 < minimum <= initial"),
        ({"initial": 8.0, "maximum": 4.0}, ValueError, "maximum=4.0"),
        ({"maximum": float("inf")}, ValueError, "the largest float32"),
        ({"growth_interval": 0}, ValueError, "growth_interval must be at least 1"),
        ({"growth_interval": 1.5}, TypeError, "growth_interval must be an integer"),
    ],
)
def test_arguments_out_of_range_are_named(kwargs, error, message):
    with pytest.raises(error, match=message):
        ja.DynamicLossScale(**kwargs)
