"""What the doctor refuses to examine, and what it says then."""

import jax
import numpy as np
import optax
import pytest

import jax_accum as ja
from jax_accum.doctor import Recipe, UnusableStepError, diagnose
from tests.faults import problem as p

tx = optax.sgd(p.RATE)


def right(params, state, microbatches):
    grads = p.right_gradient(params, microbatches)
    return (params, state) if grads is None else p.jitted(tx)(params, state, grads)


def ignores_its_microbatches(params, state, microbatches):
    return jax.tree.map(lambda w: w * 0.9, params), state


def mutates_its_microbatches(params, state, microbatches):
    out = right(params, state, microbatches)
    microbatches[0]["x"] *= 2
    return out


def mutates_its_parameters(params, state, microbatches):
    new = right(params, state, microbatches)[0]
    for name in params:
        params[name][...] = np.asarray(new[name])
    return params, state


def returns_another_tree(params, state, microbatches):
    return {"w1": params["w1"]}, state


def returns_another_shape(params, state, microbatches):
    return params | {"b1": params["b1"][:-1]}, state


def returns_parameters_alone(params, state, microbatches):
    return params


def raises(params, state, microbatches):
    raise RuntimeError("no such device")


def make_random():
    rng = np.random.default_rng()

    def random(params, state, microbatches):
        params, state = right(params, state, microbatches)
        return jax.tree.map(lambda w: w + rng.normal(), params), state

    return random


@pytest.mark.parametrize(
    ("update", "said"),
    [
        (ignores_its_microbatches, "ignores its microbatches"),
        (mutates_its_microbatches, "changed the microbatches it was given"),
        (mutates_its_parameters, "changed the parameters it was given in place"),
        (returns_another_tree, "another structure"),
        (returns_another_shape, "another shape at .*'b1'.*4.*for.*5"),
        (returns_parameters_alone, r"return \(params, opt_state\)"),
        (raises, "raised RuntimeError: no such device"),
        (make_random(), "not deterministic.*Seed it"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_step_from_which_nothing_can_be_learned_is_refused_with_the_reason(update, said):
    with pytest.raises(UnusableStepError, match=said):
        diagnose(update, p.make_case(1, init=tx.init))


def test_an_init_that_raises_is_named_as_such():
    def init(params):
        raise KeyError("encoder")

    with pytest.raises(UnusableStepError, match=r"case.init raised KeyError: 'encoder'"):
        diagnose(right, p.make_case(1, init=init))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"microbatches": 1}, ValueError, "microbatches=1 accumulates nothing"),
        ({"microbatch_size": 0}, ValueError, "microbatch_size must be an integer of at least 1"),
        ({"replicas": 1.5}, ValueError, "replicas must be an integer"),
        ({"loss_fn": None}, ValueError, "exactly one of loss_fn"),
        ({"sums": lambda p, b: {}}, ValueError, "exactly one of loss_fn"),
        ({"recipe": optax.sgd(1.0)}, TypeError, "recipe must be a doctor.Recipe"),
        ({"examples": []}, ValueError, "examples is empty"),
        ({"labels": "targets"}, ValueError, "labels='targets' is no entry"),
        ({"params": {}}, ValueError, "params holds no array"),
        ({"examine": ["raged"]}, ValueError, r"examine names \['raged'\]"),
        ({"microbatch_size": 20}, ValueError, "give more examples, or smaller microbatches"),
    ],
    ids=lambda x: " and ".join(x) if isinstance(x, dict) else None,
)
def test_a_case_that_makes_no_sense_is_refused_with_the_argument_named(changes, error, said):
    with pytest.raises(error, match=said):
        p.make_case(1).replace(**changes)


def test_examples_of_different_shapes_are_refused_with_the_first_that_differs():
    examples = p.draw_examples(1)
    examples[3] = {name: value[:2] for name, value in examples[3].items()}
    with pytest.raises(ValueError, match=r"examples\[3\] is not like examples\[0\].*pad them"):
        p.make_case(1).replace(examples=examples)


def test_examples_without_any_supervision_are_refused():
    case = p.make_case(1)
    ignored = [e | {"labels": np.full_like(e["labels"], -100)} for e in case.examples]
    with pytest.raises(ValueError, match="nothing in them is supervised"):
        diagnose(right, case.replace(examples=ignored, init=tx.init))


def test_a_loss_that_returns_a_number_is_refused():
    case = p.make_case(1, loss_fn=lambda params, batch: 1.0)
    with pytest.raises(TypeError, match=r"the doctor needs a jax_accum.Weighted"):
        diagnose(right, case)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "case must be a doctor.Case"),
        ({"case": 3, "update": right}, "case must be a doctor.Case, got int"),
        ({"case": "a case"}, "case must be a doctor.Case, got str"),
    ],
)
def test_a_missing_or_wrong_case_is_a_type_error(arguments, said):
    with pytest.raises(TypeError, match=said):
        diagnose(**arguments)


def test_neither_or_both_of_update_and_grad_or_one_that_is_no_function_are_type_errors():
    case = p.make_case(1)
    with pytest.raises(TypeError, match="exactly one of update and grad"):
        diagnose(case=case)
    with pytest.raises(TypeError, match="exactly one of update and grad"):
        diagnose(right, case, grad=right)
    with pytest.raises(TypeError, match="update must be a function, got int"):
        diagnose(3, case)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "lion"}, "kind must be one of"),
        ({"clip_norm": 0.0}, "clip_norm must be above 0"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
    ],
)
def test_a_recipe_out_of_range_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Recipe(**settings)


def test_dropout_that_is_not_active_or_cannot_be_told_is_unknown():
    case = p.make_case(1, init=tx.init, dropout=True)
    found = diagnose(right, case)
    assert (found.status, found.fault) == ("unknown", None)
    assert "No dropout is active" in found.summary
    opt = ja.MultiSteps(tx, p.A)

    def waits(params, state, microbatches):
        for batch in microbatches:
            params, state = opt.apply(
                p.grad_of_mean(params, batch), state, params, weight=p.count_tokens(batch)
            )
        return params, state

    with pytest.raises(UnusableStepError, match="did nothing with a group of one microbatch"):
        diagnose(waits, case.replace(init=opt.init))
