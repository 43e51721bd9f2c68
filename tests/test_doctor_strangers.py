"""Steps that are not in the gallery, right and wrong in unusual ways: none gets a wrong name."""

import importlib.util

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jax_accum as ja
from jax_accum.doctor import Case, Recipe, diagnose
from tests.faults import problem as p

sgd = optax.sgd(p.RATE)
RAGGED = ["ragged"]


def running_weighted_mean(seed):
    def update(params, state, microbatches):
        mean, weight = p.times(params, 0.0), 0
        for batch in microbatches:
            if tokens := int(p.count_tokens(batch)):
                weight += tokens
                grads = p.grad_of_mean(params, batch)
                share = tokens / weight
                mean = jax.tree.map(lambda m, g, share=share: m + (g - m) * share, mean, grads)
        return p.jitted(sgd)(params, state, mean) if weight else (params, state)

    return {"update": update, "case": p.make_case(seed, init=sgd.init)}


def right_under(tx, seed, **changes):
    """A right group gradient, handed to this optimizer."""

    def update(params, state, microbatches):
        grads = p.right_gradient(params, microbatches)
        return (params, state) if grads is None else p.jitted(tx)(params, state, grads)

    return {"update": update, "case": p.make_case(seed, init=tx.init, **changes)}


def warm_up_from_zero(seed):
    recipe = Recipe("adamw", learning_rate=lambda n: 0.05 * min(n, 4) / 4, weight_decay=0.1)
    tx = optax.adamw(optax.linear_schedule(0.0, 0.05, 4), weight_decay=0.1)
    return right_under(tx, seed, recipe=recipe)


def warm_up_per_microbatch(seed):
    def update(params, state, microbatches):
        inner, count = state
        rate = p.RATE * min(count + len(microbatches) - 1, 4) / 4
        grads = p.right_gradient(params, microbatches)
        params = jax.tree.map(lambda w, g: w - np.float32(rate) * g, params, grads)
        return params, (inner, count + len(microbatches))

    recipe = Recipe("sgd", learning_rate=lambda n: p.RATE * min(n, 4) / 4)
    case = p.make_case(seed, init=lambda w: (None, 0), recipe=recipe, examine=RAGGED)
    return {"update": update, "case": case}


def clipped_by_value(seed):
    return right_under(optax.chain(optax.clip(0.02), sgd), seed)


def decay_with_a_mask(seed):
    mask = {"w1": True, "w2": True, "b1": False, "b2": False}
    tx = optax.adamw(0.05, weight_decay=0.1, mask=mask)
    recipe = Recipe("adamw", learning_rate=0.05, weight_decay=0.1)
    return right_under(tx, seed, recipe=recipe)


def nesterov(seed):
    recipe = Recipe("sgd", learning_rate=0.3, momentum=0.9)
    return right_under(optax.sgd(0.3, momentum=0.9, nesterov=True), seed, recipe=recipe)


def by_the_library(seed, loss_fn):
    """The group gradient of several terms."""
    fn = jax.jit(ja.accumulated_value_and_grad(loss_fn, None))

    def grad(params, microbatches):
        return fn(params, p.stacked(microbatches))[1]

    examine = ["ragged", "ignored"]
    return {"grad": grad, "case": p.make_case(seed, loss_fn=loss_fn, examine=examine)}


def a_term_once_per_microbatch(seed):
    def loss_fn(params, batch):
        size = sum(jnp.sum(w**2) for w in jax.tree.leaves(params))
        return {"tokens": p.loss_fn(params, batch), "size": ja.Weighted(0.01 * size, jnp.ones(()))}

    return by_the_library(seed, loss_fn)


def a_term_over_ignored_positions_too(seed):
    def loss_fn(params, batch):
        z = jax.nn.logsumexp(p.logits_of(params, batch["x"]), axis=-1)
        spread = ja.Weighted(0.1 * jnp.sum(z**2), jnp.full((), float(z.size)))
        return {"tokens": p.loss_fn(params, batch), "z": spread}

    return by_the_library(seed, loss_fn)


def float32_masters_of_bfloat16(seed):
    def wide(tree):
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)

    def narrow(tree):
        return jax.tree.map(lambda x: np.asarray(x.astype(jnp.bfloat16)), tree)

    def update(params, masters, microbatches):
        grads, tokens = None, 0
        for batch in microbatches:
            grads = p.add(grads, wide(p.grad_of_sum(params, batch)))
            tokens += int(p.count_tokens(batch))
        if tokens:
            masters = jax.tree.map(lambda w, g: w - p.RATE * g / tokens, masters, grads)
        return narrow(masters), masters

    return {"update": update, "case": p.make_case(seed, init=wide, dtype=ml_dtypes.bfloat16)}


def a_module_of_nnx(seed):
    if importlib.util.find_spec("flax") is None:
        pytest.skip("needs Flax")
    from flax import nnx

    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.05))

    class Model(nnx.Module):
        def __init__(self, params):
            for name, value in params.items():
                setattr(self, name, nnx.Param(jnp.asarray(value)))

    def init(params):
        model = Model(params)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def update(params, state, microbatches):
        model, optimizer = state
        grads = p.right_gradient({n: getattr(model, n)[...] for n in params}, microbatches)
        if grads is not None:
            optimizer.update(model, nnx.State({n: nnx.Param(g) for n, g in grads.items()}))
        return {n: np.array(getattr(model, n)[...]) for n in params}, state

    recipe = Recipe("adamw", learning_rate=1e-2, weight_decay=0.05, clip_norm=0.5)
    return {"update": update, "case": p.make_case(seed, init=init, recipe=recipe, microbatches=6)}


def summed(factor):
    """Sums over the group, times a factor of the microbatches' tokens."""

    def make(seed):
        def grad(params, microbatches):
            grads = None
            for batch in microbatches:
                grads = p.add(grads, p.grad_of_sum(params, batch))
            return p.times(grads, factor([int(p.count_tokens(b)) for b in microbatches]))

        return {"grad": grad, "case": p.make_case(seed, examine=RAGGED)}

    return make


def some_of(choose):
    """Right, over other microbatches than were given."""

    def make(seed):
        def grad(params, microbatches):
            return p.right_gradient(params, choose(microbatches))

        return {"grad": grad, "case": p.make_case(seed, examine=RAGGED)}

    return make


def own_denominators_summed_over_replicas(seed):
    def grad(params, microbatches):
        total = None
        for replica in range(2):
            rows = slice(replica * p.M, (replica + 1) * p.M)
            mine = [{n: x[rows] for n, x in batch.items()} for batch in microbatches]
            total = p.add(total, p.right_gradient(params, mine))
        return total

    case = p.make_case(seed, replicas=2, microbatches=3, examine=RAGGED)
    return {"grad": grad, "case": case}


def l2_added_in_every_microbatch(seed):
    decay = 0.02

    def update(params, state, microbatches):
        tokens = sum(int(p.count_tokens(b)) for b in microbatches)
        grads = None
        for batch in microbatches:
            own = p.grad_of_sum(params, batch)
            own = jax.tree.map(lambda g, w: g / tokens + decay * w, own, params)
            grads = p.add(grads, own)
        return p.jitted(sgd)(params, state, grads)

    recipe = Recipe("sgd", learning_rate=p.RATE, weight_decay=decay)
    case = p.make_case(seed, init=sgd.init, recipe=recipe, examine=RAGGED)
    return {"update": update, "case": case}


RIGHT, UNKNOWN = ("right", None, None), ("unknown", None, None)
STRANGERS = [
    (running_weighted_mean, RIGHT),
    (warm_up_from_zero, RIGHT),
    (a_term_once_per_microbatch, RIGHT),
    (a_term_over_ignored_positions_too, RIGHT),
    (float32_masters_of_bfloat16, RIGHT),
    (a_module_of_nnx, RIGHT),
    (warm_up_per_microbatch, ("fault", "schedule counted per microbatch", None)),
    (
        own_denominators_summed_over_replicas,
        ("fault", "multiplied by the replicas", "replica's own denominator"),
    ),
    # What Recipe cannot say, and faults that have no name.
    (clipped_by_value, UNKNOWN),
    (decay_with_a_mask, UNKNOWN),
    (nesterov, UNKNOWN),
    (l2_added_in_every_microbatch, UNKNOWN),
    pytest.param(
        summed(lambda tokens: 1 / (len(tokens) * tokens[0])), UNKNOWN, id="first weight times A"
    ),
    pytest.param(some_of(lambda group: group[:-1] or group), UNKNOWN, id="all but the last"),
    pytest.param(
        some_of(lambda group: [*group, *group[-1:]] if group[1:] else group),
        UNKNOWN,
        id="the last one twice",
    ),
]


@pytest.mark.parametrize(
    ("make", "expected"), STRANGERS, ids=lambda x: getattr(x, "__name__", None)
)
def test_a_stranger_gets_the_right_name_or_none(make, expected):
    found = diagnose(**make(31))
    assert (found.status, found.fault, found.also) == expected, found


@pytest.mark.parametrize("factor", [1.0, 1.1], ids=["right", "a tenth too large"])
def test_tokens_that_never_occur_do_not_hide_a_fault_behind_adam(factor):
    """Their gradients are exactly 0, and Adam would make a whole update of any rounding error."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 8, (24, p.T)).astype(np.int32)
    labels = rng.integers(0, p.V, (24, p.T)).astype(np.int32)
    labels[np.arange(p.T) >= rng.integers(1, p.T + 1, (24, 1))] = -100
    params = {"table": rng.normal(size=(400, p.V)).astype(np.float32)}  # 8 of 400 occur
    tx = optax.adamw(0.05, weight_decay=0.0)

    def loss_fn(params, batch):
        return ja.losses.softmax_cross_entropy(params["table"][batch["x"]], batch["labels"])

    fn = jax.jit(ja.accumulated_value_and_grad(loss_fn, None))

    def update(params, state, microbatches):
        grads = fn(params, p.stacked(microbatches))[1]
        new, state = p.jitted(tx)(params, state, grads)
        if len(microbatches) == 1:
            return new, state
        return jax.tree.map(lambda a, b: a + (b - a) * factor, params, new), state

    case = Case(
        params=params,
        examples=[{"x": a, "labels": b} for a, b in zip(tokens, labels, strict=True)],
        loss_fn=loss_fn,
        init=tx.init,
        recipe=Recipe("adamw", learning_rate=0.05),
        labels="labels",
        examine=RAGGED,
    )
    assert diagnose(update, case).right == (factor == 1.0)


def test_a_right_step_costs_few_shapes_of_the_step_and_three_of_the_loss():
    """Compilation is most of a diagnosis: one of the loss for each dtype, one of its weights."""
    traced, sizes = [], set()

    def loss_fn(params, batch):
        traced.append((batch["x"].shape[0], params["w1"].dtype.name))
        return p.loss_fn(params, batch)

    def update(params, state, microbatches):
        sizes.add(len(microbatches))
        grads = p.right_gradient(params, microbatches)
        return (params, state) if grads is None else p.jitted(sgd)(params, state, grads)

    assert diagnose(update, p.make_case(32, init=sgd.init, loss_fn=loss_fn)).right
    assert sorted(traced) == [(1, "float64"), (p.M, "float32"), (p.M, "float64")]
    assert sizes == {p.A, p.A - 1}


def test_batch_statistics_are_found_with_and_without_labels_to_ignore():
    def loss_fn(params, batch):
        x = batch["x"] - jnp.mean(batch["x"], axis=(0, 1))
        return p.loss_fn(params, batch | {"x": x})

    grad_of_sum = jax.jit(jax.grad(lambda params, batch: loss_fn(params, batch).total))

    def grad(params, microbatches):
        total, tokens = None, 0
        for batch in microbatches:
            total = p.add(total, grad_of_sum(params, batch))
            tokens += int(p.count_tokens(batch))
        return p.times(total, 1 / max(tokens, 1))

    case = p.make_case(33, loss_fn=loss_fn)
    assert diagnose(grad=grad, case=case).fault == "batch statistics"
    unlabelled = case.replace(labels=None, examine=RAGGED)
    assert diagnose(grad=grad, case=unlabelled).fault == "batch statistics"
