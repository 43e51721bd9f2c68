"""What `MultiSteps` computes: groups, weights, ends of streams, precision, counters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_accum as ja

W = {"w": jnp.zeros(())}


def run(opt, calls, params=W, state=None):
    """The parameters after each of `calls`: `(gradient, kwargs)`; by `apply`."""
    state = opt.init(params) if state is None else state
    after = []
    for grad, kwargs in calls:
        params, state = opt.apply(
            jax.tree.map(lambda p, g=grad: jnp.asarray(g, p.dtype), params), state, params, **kwargs
        )
        after.append(params)
    return after, state


def values(after):
    return [float(p["w"]) for p in after]


def test_two_microbatches_of_512_and_1536_tokens_are_not_averaged_as_equals():
    opt = ja.MultiSteps(optax.sgd(1.0), 2)
    after, _ = run(opt, [(2.0, {"weight": 512}), (4.0, {"weight": 1536})])
    assert values(after) == [0.0, -3.5]


def test_a_microbatch_with_nothing_supervised_contributes_nothing_though_its_gradient_is_nan():
    opt = ja.MultiSteps(optax.sgd(1.0), 2)
    after, state = run(opt, [(jnp.nan, {"weight": 0}), (4.0, {"weight": 3})])
    assert values(after) == [0.0, -4.0]
    assert ja.counts(state)["microbatches"] == 2


@pytest.mark.parametrize("k", [1, 2])
def test_a_group_with_nothing_supervised_is_a_skip_that_touches_nothing(k):
    opt = ja.MultiSteps(optax.adamw(0.1), k)
    params = {"w": jnp.float32(2.0)}
    _, state = run(opt, [(1.0, {"weight": 1})] * k, params)
    after, new = run(opt, [(jnp.nan, {"weight": 0})] * k, params, state)
    assert after[-1]["w"] == 2.0
    jax.tree.map(np.testing.assert_array_equal, new.inner_opt_state, state.inner_opt_state)
    assert not opt.has_updated(new)
    counts = ja.counts(new)
    assert (counts["attempts"], counts["updates"], counts["skipped_empty"]) == (2, 1, 1)
    assert int(new.gradient_step) == 1


@pytest.mark.parametrize(
    "flush", [True, np.True_, jnp.asarray(True)], ids=["Python", "NumPy", "JAX"]
)
def test_the_end_of_the_stream_closes_a_partial_group_with_its_own_weight(flush):
    opt = ja.MultiSteps(optax.sgd(1.0), 4)
    calls = [(float(n), {"flush": flush} if n == 6 else {}) for n in range(1, 7)]
    after, state = run(opt, calls)
    assert values(after) == [0, 0, 0, -2.5, -2.5, -8.0]
    assert opt.has_updated(state)


def test_a_stream_shorter_than_a_group_makes_one_update_and_leaks_nothing_into_the_next_epoch():
    opt = ja.MultiSteps(optax.sgd(1.0), 4)
    params, state = W, opt.init(W)
    for _ in range(2):
        for n in (1.0, 2.0, 6.0):
            params, state = opt.apply({"w": jnp.float32(n)}, state, params, flush=n == 6.0)
    assert float(params["w"]) == -6.0
    assert ja.counts(state)["updates"] == 2


def test_a_second_epoch_begins_with_a_group_of_its_own():
    opt = ja.MultiSteps(optax.sgd(1.0), 8)
    step = jax.jit(lambda g, s, p, f: opt.apply({"w": g}, s, p, flush=f))
    params, state = W, opt.init(W)
    for epoch, grad in enumerate((1.0, 100.0)):
        for n in range(63):
            params, state = step(grad, state, params, n == 62)
            if epoch == 1 and n == 7:
                assert float(params["w"]) == -108.0  # eight groups of 1, then one of 100 alone
    assert ja.counts(state)["updates"] == 16


@pytest.mark.parametrize("flush", [True, jnp.asarray(True)], ids=["Python", "JAX"])
@pytest.mark.parametrize("way", ["no microbatch", "a microbatch without weight"])
def test_flushing_an_empty_group_does_nothing_and_counts_nothing(flush, way):
    opt = ja.MultiSteps(optax.adam(0.1), 4)
    state = opt.init(W)
    grads, kwargs = (None, {}) if way == "no microbatch" else (W, {"weight": 0})
    updates, new = opt.update(grads, state, W, flush=flush, **kwargs)
    assert updates["w"] == 0
    assert set(ja.counts(new).values()) == {0}
    assert not opt.has_updated(new)
    jax.tree.map(np.testing.assert_array_equal, new.inner_opt_state, state.inner_opt_state)


def test_a_call_without_a_microbatch_closes_the_open_group():
    opt = ja.MultiSteps(optax.sgd(1.0), 4)
    params, state = opt.apply({"w": jnp.float32(3.0)}, opt.init(W), W, weight=5, examples=2)
    params, state = opt.apply(None, state, params)
    assert float(params["w"]) == 0.0
    params, state = opt.apply(None, state, params, flush=True)
    assert float(params["w"]) == -3.0
    counts = ja.counts(state)
    assert (counts["microbatches"], counts["examples"], counts["tokens"]) == (1, 2, 5)


def test_clipping_sees_the_gradient_of_the_group():
    opt = ja.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), 2)
    params, state = jnp.zeros(2), None
    state = opt.init(params)
    for grad in ([2.0, 0.0], [0.0, 2.0]):
        params, state = opt.apply(jnp.asarray(grad), state, params)
    np.testing.assert_allclose(params, -np.sqrt([0.5, 0.5]), rtol=1e-6)


def test_an_inf_is_forgotten_with_its_group():
    plain = ja.MultiSteps(ja.guard(optax.adam(0.1)), 2)
    calls = [(1.0, {}), (3.0, {}), (-2.0, {}), (5.0, {})]
    want, _ = run(plain, calls)
    got, state = run(plain, [(jnp.inf, {}), (1.0, {}), *calls])
    assert values(got) == [0.0, 0.0, *values(want)]
    assert ja.counts(state)["skipped_nonfinite"] == 1


def test_without_a_guard_an_inf_reaches_its_own_update_and_no_call_between():
    opt = ja.MultiSteps(optax.sgd(0.0), 2)
    state = opt.init(W)
    for n, grad in enumerate([jnp.inf, 1.0, 1.0, 1.0]):
        updates, state = opt.update({"w": jnp.float32(grad)}, state, W)
        assert (float(updates["w"]) == 0.0) == (n != 1)


def test_schedules_averages_and_weight_decay_advance_once_per_update():
    inner = optax.chain(
        optax.ema(0.9), optax.add_decayed_weights(0.5), optax.scale_by_schedule(lambda n: -1.0 - n)
    )
    opt = ja.MultiSteps(inner, 4)
    params = {"w": jnp.float32(8.0)}
    after, state = run(opt, [(0.0, {})] * 8, params)
    assert values(after)[3::4] == [8.0 - 4.0, 4.0 - 2 * 2.0]
    ema, _, schedule = state.inner_opt_state
    assert int(ema.count) == int(schedule.count) == 2


def test_a_skipped_group_is_an_attempt_and_not_an_update():
    opt = ja.MultiSteps(ja.guard(optax.adam(optax.linear_schedule(1.0, 0.0, 10))), 2)
    _, state = run(opt, [(1.0, {}), (1.0, {}), (1.0, {}), (jnp.nan, {})])
    counts = ja.counts(state)
    assert (counts["attempts"], counts["updates"], counts["skipped_nonfinite"]) == (2, 1, 1)
    assert not opt.has_updated(state)
    assert int(state.gradient_step) == 1
    adam, schedule = state.inner_opt_state.inner_state
    assert int(adam.count) == int(schedule.count) == 1


def test_has_updated_is_true_for_the_very_call_that_changed_the_parameters():
    opt = ja.MultiSteps(optax.sgd(1.0), 2)
    state = opt.init(W)
    seen = [bool(opt.has_updated(state))]
    for grads in (W, W, None, W, W):
        _, state = opt.update(grads, state, W)
        seen.append(bool(opt.has_updated(state)))
    assert seen == [False, False, True, False, False, True]


def test_a_rejected_microbatch_is_divided_by_no_one():
    def reject(updates, gradient_step, params):
        skip = jnp.abs(updates["w"]) > 50
        return skip, {"rejected": skip}

    opt = ja.MultiSteps(optax.sgd(1.0), 3, should_skip_update_fn=reject)
    calls = [(g, {"weight": w}) for g, w in ((1.0, 1), (99.0, 7), (2.0, 2), (5.0, 3))]
    after, state = run(opt, calls)
    assert values(after) == pytest.approx([0, 0, 0, -20 / 6], rel=1e-6)
    assert ja.counts(state)["microbatches"] == 3
    assert ja.counts(state)["tokens"] == 6
    assert not state.skip_state["rejected"]


def test_plain_sums_are_not_divided():
    opt = ja.MultiSteps(optax.sgd(1.0), 2, use_grad_mean=False)
    after, _ = run(opt, [(1.0, {"weight": 2}), (5.0, {"weight": 3})])
    assert values(after)[-1] == -17.0


def test_a_gradient_of_a_sum_is_divided_by_its_weight_and_not_multiplied():
    opt = ja.MultiSteps(optax.sgd(1.0), 2, loss_reduction="sum")
    after, _ = run(opt, [(2.0, {"weight": 1}), (10.0, {"weight": 3})])
    assert values(after)[-1] == -3.0


def test_complex_gradients_keep_their_imaginary_part():
    opt = ja.MultiSteps(optax.sgd(1.0), 2)
    params = jnp.zeros((), jnp.complex64)
    state = opt.init(params)
    for _ in range(2):
        params, state = opt.apply(jnp.asarray(1 + 1j, jnp.complex64), state, params)
    assert complex(params) == -1 - 1j


def test_float64_gradients_are_not_rounded(x64):
    opt = ja.MultiSteps(optax.sgd(1.0), 2)
    params = jnp.zeros((), jnp.float64)
    state = opt.init(params)
    for _ in range(2):
        params, state = opt.apply(jnp.asarray(1 + 2.0**-40, jnp.float64), state, params)
    assert float(params) == -(1 + 2.0**-40)


def test_257_bfloat16_ones_sum_to_257():
    opt = ja.MultiSteps(optax.sgd(1.0), 257, use_grad_mean=False, accumulator_dtype=jnp.bfloat16)
    params, state = jnp.zeros(()), opt.init(jnp.zeros(()))
    apply = jax.jit(opt.apply)
    for _ in range(257):
        params, state = apply(jnp.ones((), jnp.bfloat16), state, params)
    assert float(params) == -257.0


def test_compensation_bounds_the_error_of_many_microbatches():
    grads = abs(np.random.default_rng(0).normal(1.0, 1.0, (2000, 64))).astype(np.float32)
    exact = grads.astype(np.float64).mean(axis=0)
    errors = {}
    for compensated in (False, True):
        opt = ja.MultiSteps(optax.sgd(1.0), len(grads), compensated=compensated)

        def call(carry, g, opt=opt):
            return opt.apply(g, carry[1], carry[0]), None

        start = jnp.zeros(64), opt.init(jnp.zeros(64))
        (params, _), _ = jax.jit(lambda s, g, call=call: jax.lax.scan(call, s, g))(start, grads)
        errors[compensated] = np.max(abs(np.asarray(params, np.float64) + exact) / exact)
    # One rounding error for Kahan's sum of positive terms, one for 1/W and the product with it.
    assert errors[True] <= 2 * np.finfo(np.float32).eps < errors[False] / 2


def test_a_change_of_k_takes_hold_where_a_group_begins():
    opt = ja.MultiSteps(optax.sgd(1.0), lambda updates: jnp.where(updates < 1, 8, 2))
    after, state = run(opt, [(float(n), {}) for n in range(12)])
    changes = np.flatnonzero(np.diff([0.0, *values(after)]))
    assert changes.tolist() == [7, 9, 11]
    assert values(after)[-1] == -(3.5 + 8.5 + 10.5)
    assert ja.counts(state)["microbatches"] == 12


@pytest.mark.parametrize("loses", ["grows", "shrinks"])
def test_a_state_restored_under_another_k_ends_its_group_at_the_smaller_and_loses_nothing(loses):
    first, second = (2, 4) if loses == "grows" else (4, 2)
    calls = [(1.0, {"weight": 1}), (2.0, {"weight": 1}), (6.0, {"weight": 2})]
    begun = 1 if loses == "grows" else 3
    before, state = run(ja.MultiSteps(optax.sgd(1.0), first), calls[:begun])
    grad, kwargs = calls[begun % 3]
    after, state = run(ja.MultiSteps(optax.sgd(1.0), second), [(grad, kwargs)], before[-1], state)
    done = [*calls[:begun], (grad, kwargs)]
    total = sum(k["weight"] for _, k in done)
    mean = sum(g * k["weight"] for g, k in done) / total
    assert values(after)[-1] == pytest.approx(-mean, rel=1e-6)
    assert ja.counts(state)["microbatches"] == len(done)
    assert int(state.mini_step) == 0


@pytest.mark.parametrize("k", [1, np.int64(1), jnp.int32(1)], ids=["Python", "NumPy", "JAX"])
@pytest.mark.parametrize("kwargs", [{}, {"weight": 7}], ids=["no weight", "a weight"])
def test_a_group_of_one_is_the_inner_optimizer_alone_bit_for_bit(k, kwargs):
    # With a weight there is a branch, in which XLA contracts adamw's sums otherwise than outside.
    inner = optax.sgd(0.1) if kwargs else optax.adamw(0.1)
    opt = ja.MultiSteps(inner, k)
    params = {"w": jnp.linspace(-1, 1, 7)}
    state, alone = opt.init(params), inner.init(params)
    assert len(jax.tree.leaves(state.acc_grads)) == 0
    update, inner_update = jax.jit(opt.update), jax.jit(inner.update)
    for n in range(3):
        grads = jax.tree.map(lambda p, n=n: jnp.sin(p + n), params)
        got, state = update(grads, state, params, **kwargs)
        want, alone = inner_update(grads, alone, params)
        jax.tree.map(np.testing.assert_array_equal, (got, state.inner_opt_state), (want, alone))


def test_three_thousand_million_tokens_are_counted():
    opt = ja.MultiSteps(optax.sgd(1.0), 2)
    _, state = run(opt, [(1.0, {"weight": 750_000_000})] * 4)
    assert ja.counts(state)["tokens"] == 3_000_000_000
    assert float(state.group.weight) == 1.5e9


def test_the_inner_optimizer_is_told_result_type_of_gradient_and_parameter():
    told = []

    def spy(updates, state, params=None):
        told.append(jax.tree.map(lambda g: g.dtype.name, updates))
        return updates, state

    inner = optax.GradientTransformation(lambda params: (), spy)
    params = {"a": jnp.ones(2), "b": jnp.ones(2, jnp.bfloat16), "c": jnp.ones(2, jnp.float16)}
    grads = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2), "c": jnp.ones(2, jnp.float16)}
    for k in (1, 2):
        opt = ja.MultiSteps(inner, k)
        told.clear()
        opt.apply(grads, opt.init(params), params, flush=True)
        assert told[-1] == {"a": "float32", "b": "float32", "c": "float16"}
        updates, _ = opt.update(grads, opt.init(params), params, flush=True)
        assert jax.tree.map(lambda u: u.dtype, updates) == jax.tree.map(lambda g: g.dtype, grads)
