"""The doctor's answers: names, evidence, what it cannot tell, and that it never guesses."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_accum as ja
from jax_accum.doctor import Recipe, diagnose
from tests.faults import gallery
from tests.faults import problem as p


def test_optax_multi_steps_with_mean_losses_of_differing_token_counts_is_a_mean_of_means():
    module = gallery.load("in_jax.mean_of_means_optax")
    found = gallery.examine(module, 11)
    assert (found.status, found.fault) == ("fault", "mean of means")
    # The shares of a group's microbatches, solved for, are W / (A * W_a), W_a its own tokens.
    case = module.case(11)
    shares = found.evidence["share of each microbatch, 1 is right"]
    assert len(shares) % case.microbatches == 0
    assert max(shares[-4:]) > 1 > min(shares[-4:])
    assert found.evidence["times better than the next"] > 100
    assert found.evidence["observed"] == pytest.approx(
        found.evidence["the fault predicts"], rel=found.tolerance
    )
    assert found.evidence["observed"] != pytest.approx(found.evidence["expected"], rel=1e-2)


def test_a_gradient_already_divided_by_the_caller_is_divided_twice():
    found = gallery.examine(gallery.load("in_jax.divided_twice"), 12)
    assert found.fault == "divided twice"
    assert found.also is None
    np.testing.assert_allclose(
        found.evidence["share of each microbatch, 1 is right"][-4:], 1 / p.A, rtol=1e-3
    )


@pytest.mark.parametrize("divided", [True, False], ids=["both faults", "after the repair"])
def test_of_two_faults_the_larger_is_named_and_after_its_repair_the_other(divided):
    opt = optax.MultiSteps(optax.sgd(p.RATE), p.A)
    apply = p.jitted(opt)

    def update(params, state, microbatches):
        for batch in microbatches:
            grads = p.times(p.grad_of_mean(params, batch), 1 / p.A if divided else 1.0)
            params, state = apply(params, state, grads)
        return params, state

    found = diagnose(update, p.make_case(13, init=opt.init))
    if divided:
        assert (found.fault, found.also) == ("divided twice", "mean of means")
    else:
        assert (found.fault, found.also) == ("mean of means", None)


def test_a_group_that_was_not_reset_is_told_with_the_examples_that_leak():
    module = gallery.load("in_jax.last_of_previous_group_leaks")
    found = gallery.examine(module, 14)
    assert found.fault == "previous group leaks in"
    case = module.case(14)
    groups = []

    def watching(params, state, microbatches):
        groups.append([rows_of(case, batch) for batch in microbatches])
        return module.update(params, state, microbatches)

    found = diagnose(watching, case)
    full = next(g for g in groups if len(g) == case.microbatches)
    assert found.evidence["examples of earlier groups in it"] == sorted(full[-1])
    assert "from microbatch 4 on" in " ".join(found.reasoning)


def rows_of(case, batch):
    """The indices of the case's examples in a microbatch."""
    return [
        next(i for i, e in enumerate(case.examples) if np.array_equal(e["x"], x))
        for x in batch["x"]
    ]


def test_a_leak_into_the_next_call_of_a_gradient_function_is_named_too():
    kept = {}

    def grad(params, microbatches):
        tokens = 0
        for batch in microbatches:
            kept["sum"] = p.add(kept.get("sum"), p.grad_of_sum(params, batch))
            tokens += int(p.count_tokens(batch))
        return p.times(kept["sum"], 1 / tokens)

    assert diagnose(grad=grad, case=p.make_case(15)).fault == "previous group leaks in"


def strange(change):
    """A step that does what no known fault does."""

    def grad(params, microbatches):
        grads = p.right_gradient(params, microbatches)
        if grads is None:
            return p.times(params, 0.0)
        return change(grads, len(microbatches))

    return grad


STRANGE = {
    "a factor of 1.1": lambda g, a: p.times(g, 1.1 if a > 1 else 1.0),
    "a factor close to 1": lambda g, a: p.times(g, 1.001 if a > 1 else 1.0),
    "the sign of one leaf": lambda g, a: g | {"b1": -g["b1"]} if a > 1 else g,
    "one leaf without gradient": lambda g, a: g | {"w2": 0 * g["w2"]} if a > 1 else g,
    "a constant added": lambda g, a: jax.tree.map(lambda x: x + 0.01 * (a > 1), g),
    "the square root of A": lambda g, a: p.times(g, a**-0.5),
}


@pytest.mark.parametrize("change", STRANGE.values(), ids=STRANGE)
def test_what_no_known_fault_explains_gets_no_name_but_its_deviation(change):
    found = diagnose(grad=strange(change), case=p.make_case(16))
    assert (found.status, found.fault) == ("unknown", None)
    assert found.evidence["deviation from right"] > found.tolerance
    assert "Unknown fault" in str(found)


def test_a_loss_that_disagrees_even_undivided_is_reported_first():
    smooth = jax.jit(
        jax.grad(
            lambda w, b: (
                ja.losses.softmax_cross_entropy(
                    p.logits_of(w, b["x"]), b["labels"], label_smoothing=0.1
                ).total
            )
        )
    )

    def grad(params, microbatches):  # and a mean of means besides
        return p.times(
            jax.tree.map(
                lambda *g: sum(g),
                *(
                    p.times(smooth(params, b), 1 / max(int(p.count_tokens(b)), 1))
                    for b in microbatches
                ),
            ),
            1 / len(microbatches),
        )

    found = diagnose(grad=grad, case=p.make_case(17))
    assert found.status == "unknown"
    assert "even where nothing is accumulated" in found.summary
    assert found.evidence["probe"] == "one microbatch"


def same_tokens(case):
    """Examples that all have four supervised positions."""
    return [
        e | {"labels": np.where(np.arange(p.T) < 4, np.maximum(e["labels"], 0), -100)}
        for e in case.examples
    ]


def mean_of_means(params, microbatches):
    return gallery.load("in_jax.mean_of_means_loop").update(
        params, optax.sgd(p.RATE).init(params), microbatches
    )[0]


def test_microbatches_of_equal_weight_leave_right_and_mean_of_means_alike_and_it_says_so():
    case = p.make_case(18, examine=())
    case = case.replace(examples=same_tokens(case))

    def update(params, state, microbatches):
        return mean_of_means(params, microbatches), state

    found = diagnose(update, case)
    assert found.right
    assert "mean of means" in found.not_told_apart
    better = case.replace(redraw=lambda seed: p.draw_examples(seed))
    assert diagnose(update, better).fault == "mean of means"


@pytest.mark.parametrize("seen", [True, False], ids=["moments seen", "moments hidden"])
def test_adam_hides_a_constant_factor_unless_its_moments_are_seen(seen):
    tx = optax.adamw(0.05, weight_decay=0.0)
    case = p.make_case(
        19,
        init=tx.init,
        recipe=Recipe("adamw", learning_rate=0.05),
        examine=(),
        observe=None if seen else lambda state: {},
    )

    def update(params, state, microbatches):
        grads = p.right_gradient(params, microbatches)
        return p.jitted(tx)(params, state, p.times(grads, 1 / p.A))

    found = diagnose(update, case)
    if seen:
        assert found.fault == "divided twice"
        assert found.evidence["quantity"] == "norm of the optimizer's mu"
    else:
        assert "divided twice" in found.not_told_apart


def test_a_clean_bill_says_how_far_it_goes():
    found = gallery.examine(gallery.load("right_in_jax.group_gradient"), 20)
    assert found.right
    assert 0 < found.evidence["largest deviation"] < found.tolerance < 1e-3
    assert any("optimizer" in line for line in found.not_examined)


def test_the_answer_is_json_for_programs_even_where_numbers_are_not_finite():
    found = gallery.examine(gallery.load("in_jax.poisoned_optax"), 21)
    told = json.loads(found.to_json())
    assert told["fault"] == "poisoned by a non-finite gradient"
    assert told["status"] == "fault"
    assert told["calls"] > 3


def test_an_accumulator_too_narrow_is_not_named_where_the_step_itself_is_that_narrow():
    import ml_dtypes

    module = gallery.load("right_in_jax.hand_written")
    found = gallery.examine(module, 22, dtype=ml_dtypes.bfloat16)
    assert found.right
    assert found.tolerance > 1e-2
    assert "accumulator of too little precision" not in found.not_told_apart


def test_more_than_one_replica_and_term_together_are_judged_by_their_own_denominators():
    fn = jax.jit(ja.accumulated_value_and_grad(p.two_terms, None))

    def grad(params, microbatches):
        return fn(params, p.stacked(microbatches))[1]

    case = p.make_case(23, loss_fn=p.two_terms, replicas=2, microbatches=2, examine=())
    assert diagnose(grad=grad, case=case).right


def test_a_coefficient_of_a_term_is_part_of_what_is_right():
    fn = jax.jit(ja.accumulated_value_and_grad(p.two_terms, None, coefficients={"sequences": 0.1}))

    def grad(params, microbatches):
        return fn(params, p.stacked(microbatches))[1]

    case = p.make_case(24, loss_fn=p.two_terms, examine=())
    assert not diagnose(grad=grad, case=case).right
    assert diagnose(grad=grad, case=case.replace(coefficients={"sequences": 0.1})).right


def test_only_numbers_are_needed_from_a_loss_that_jax_cannot_run():
    def sums(params, microbatch):
        total = grads = 0.0
        for x, labels in zip(microbatch["x"], microbatch["labels"], strict=True):
            told = (labels != -100)[:, None]
            grads = grads + (told * x).sum(0) * params["w"]
            total += float(0.5 * ((told * x).sum(0) * params["w"] ** 2).sum())
        return {"loss": (total, float((microbatch["labels"] != -100).sum()), {"w": grads})}

    def grad(params, microbatches):
        found = [sums(params, b)["loss"] for b in microbatches]
        return {"w": sum(g["w"] for _, _, g in found) / sum(w for _, w, _ in found)}

    case = p.make_case(25).replace(
        params={"w": np.linspace(0.5, 1.5, p.F)}, loss_fn=None, sums=sums, examine=["ragged"]
    )
    assert diagnose(grad=grad, case=case).right

    def means(params, microbatches):
        found = [sums(params, b)["loss"] for b in microbatches]
        return {"w": sum(g["w"] / w for _, w, g in found) / len(found)}

    assert diagnose(grad=means, case=case).fault == "mean of means"


def test_jnp_arrays_and_numpy_arrays_are_parameters_alike():
    module = gallery.load("right_in_jax.hand_written")
    case = module.case(26)
    case = case.replace(params=jax.tree.map(jnp.asarray, case.params))
    assert diagnose(module.update, case).right
