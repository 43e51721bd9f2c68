"""Bad input of `MultiSteps`: each error names the argument and what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_accum as ja

PARAMS = {"w": jnp.ones(3), "b": jnp.ones(())}


@pytest.mark.parametrize(
    ("k", "error"),
    [(0, ValueError), (-2, ValueError), (2.0, TypeError), (True, TypeError), ("4", TypeError)],
)
def test_k_must_be_an_integer_of_at_least_1(k, error):
    with pytest.raises(error, match="every_k_schedule must be"):
        ja.MultiSteps(optax.sgd(1.0), k)


@pytest.mark.parametrize("k", [0, -1, 0.0, np.inf, np.nan])
def test_a_schedule_that_returns_less_than_1_is_named(k):
    with pytest.raises(ValueError, match="every_k_schedule returned"):
        ja.MultiSteps(optax.sgd(1.0), lambda updates: k).init(PARAMS)


@pytest.mark.parametrize("k", [jnp.ones(2), 1j], ids=["an array", "complex"])
def test_a_schedule_that_returns_no_number_is_named(k):
    with pytest.raises(TypeError, match="every_k_schedule must return an integer scalar"):
        ja.MultiSteps(optax.sgd(1.0), lambda updates: k).init(PARAMS)


def test_a_traced_schedule_below_1_counts_as_1():
    opt = ja.MultiSteps(optax.sgd(1.0), lambda updates: updates - 1)
    state = jax.jit(opt.init)(PARAMS)
    assert int(state.group.k) == 1


@pytest.mark.parametrize("weight", [-1, -0.5, np.nan, np.inf, 1e300, jnp.float32(-2)])
def test_a_known_weight_must_be_finite_and_not_negative(weight):
    opt = ja.MultiSteps(optax.sgd(1.0), 2)
    with pytest.raises(ValueError, match="weight must be finite and at least 0"):
        opt.update(PARAMS, opt.init(PARAMS), PARAMS, weight=weight)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
@pytest.mark.parametrize(
    "options",
    [{}, {"loss_reduction": "sum"}, {"loss_reduction": "sum", "use_grad_mean": False}],
    ids=["means", "sums", "plain sums"],
)
def test_a_traced_weight_that_is_wrong_makes_its_group_nan_and_a_guard_skips_it(k, weight, options):
    opt = ja.MultiSteps(optax.sgd(1.0), k, **options)
    guarded = ja.MultiSteps(ja.guard(optax.sgd(1.0)), k, **options)
    for one, skipped in ((opt, 0), (guarded, 1)):
        update = jax.jit(lambda g, s, p, w, one=one: one.update(g, s, p, weight=w, flush=True))
        updates, state = update(PARAMS, one.init(PARAMS), PARAMS, weight)
        assert bool(jnp.isnan(updates["w"]).all()) == (not skipped)
        assert ja.counts(state)["skipped_nonfinite"] == skipped


@pytest.mark.parametrize(
    ("weight", "error"),
    [(np.ones(2), ValueError), (1j, TypeError), (ja.Weighted(2.0, 1), TypeError)],
    ids=["an array", "complex", "a loss"],
)
def test_a_weight_must_be_a_real_scalar(weight, error):
    opt = ja.MultiSteps(optax.sgd(1.0), 2)
    with pytest.raises(error, match="weight must be"):
        opt.update(PARAMS, opt.init(PARAMS), PARAMS, weight=weight)


@pytest.mark.parametrize("flush", [1, "yes", None, jnp.ones(()), jnp.ones(2, bool)])
def test_flush_must_be_boolean(flush):
    opt = ja.MultiSteps(optax.sgd(1.0), 2)
    with pytest.raises(TypeError, match="flush must be a bool or a boolean scalar"):
        opt.update(PARAMS, opt.init(PARAMS), PARAMS, flush=flush)


@pytest.mark.parametrize("k", [1, 2])
def test_gradients_of_another_structure_or_shape_are_named(k):
    opt = ja.MultiSteps(optax.sgd(1.0), k)
    state = opt.init(PARAMS)
    with pytest.raises(ValueError, match="updates must have the tree structure"):
        opt.update({"w": PARAMS["w"]}, state, PARAMS)
    with pytest.raises(ValueError, match=r"updates\['w'\] has shape \(2,\)"):
        opt.update({**PARAMS, "w": jnp.ones(2)}, state, PARAMS)


@pytest.mark.parametrize("k", [1, 2])
def test_gradients_of_integer_type_are_refused(k):
    opt = ja.MultiSteps(optax.sgd(1.0), k)
    with pytest.raises(TypeError, match=r"updates\['w'\] has dtype int32"):
        opt.update({**PARAMS, "w": jnp.ones(3, jnp.int32)}, opt.init(PARAMS), PARAMS)


def test_a_gradient_wider_than_its_accumulator_is_refused_and_the_remedy_works():
    complex_grads = jax.tree.map(lambda p: p + 1j, PARAMS)
    opt = ja.MultiSteps(optax.sgd(1.0), 2)
    with pytest.raises(TypeError, match="accumulator_dtype=complex64"):
        opt.update(complex_grads, opt.init(PARAMS), PARAMS)
    opt = ja.MultiSteps(optax.identity(), 2, accumulator_dtype=jnp.complex64)
    updates, _ = opt.update(complex_grads, opt.init(PARAMS), PARAMS, flush=True)
    assert updates["b"] == 1 + 1j


def test_a_state_without_accumulators_is_not_taken_for_one_of_groups_of_one():
    state = ja.MultiSteps(optax.sgd(1.0), 1).init(PARAMS)
    with pytest.raises(ValueError, match="Was the state made by init for other parameters"):
        ja.MultiSteps(optax.sgd(1.0), 2).update(PARAMS, state, PARAMS)


def test_a_leaf_that_is_no_array_is_named():
    with pytest.raises(TypeError, match=r"params\['name'\] is a str.*eqx|equinox"):
        ja.MultiSteps(optax.sgd(1.0), 2).init({"w": jnp.ones(2), "name": "layer"})


def test_an_unbound_axis_name_is_named():
    opt = ja.MultiSteps(optax.sgd(1.0), 2, axis_name="data")
    with pytest.raises(ValueError, match="axis_name='data' is not bound"):
        opt.update(PARAMS, opt.init(PARAMS), PARAMS)


def test_replicas_need_an_axis_name_and_are_at_least_1():
    with pytest.raises(ValueError, match="replicas goes together with axis_name"):
        ja.MultiSteps(optax.sgd(1.0), 2).init(PARAMS, replicas=2)
    with pytest.raises(ValueError, match="replicas must be at least 1"):
        ja.MultiSteps(optax.sgd(1.0), 2, axis_name="data").init(PARAMS, replicas=0)


def test_should_skip_and_axis_name_do_not_go_together():
    with pytest.raises(ValueError, match=r"Wrap the inner optimizer in jax_accum\.guard"):
        ja.MultiSteps(
            optax.sgd(1.0), 2, should_skip_update_fn=optax.skip_not_finite, axis_name="data"
        )


def test_constructor_arguments_out_of_range_are_named():
    with pytest.raises(ValueError, match="loss_reduction must be 'mean' or 'sum', got 'average'"):
        ja.MultiSteps(optax.sgd(1.0), 2, loss_reduction="average")
    with pytest.raises(TypeError, match="accumulator_dtype must be a floating"):
        ja.MultiSteps(optax.sgd(1.0), 2, accumulator_dtype=jnp.int32)
    with pytest.raises(TypeError, match="opt must be an Optax gradient transformation"):
        ja.MultiSteps("adam", 2)


@pytest.mark.parametrize("name", ["examples", "tokens", "microbatches"])
def test_counted_numbers_must_be_scalars_and_not_negative(name):
    opt = ja.MultiSteps(optax.sgd(1.0), 2)
    with pytest.raises(ValueError, match=f"{name} must be a finite number of at least 0"):
        opt.update(PARAMS, opt.init(PARAMS), PARAMS, **{name: -1})
    with pytest.raises(ValueError, match=f"{name} must be a scalar"):
        opt.update(PARAMS, opt.init(PARAMS), PARAMS, **{name: jnp.ones(2)})
