"""Rules of parameter maps: what they do to arrays, and what is wrong with wrong ones."""

import numpy as np
import pytest

from jax_accum.crosscheck.rules import Rule, RuleMap, named_arrays, rebuilt


def shapes(arrays):
    return {name: array.shape for name, array in arrays.items()}


def drawn(**sizes):
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape) for name, shape in sizes.items()}


def test_every_kind_of_rule_goes_there_and_back_without_changing_a_bit():
    ours = {
        "layers/w": (3, 2, 5),
        "out/kernel": (2, 4, 6),
        "q/kernel": (6, 2, 4),
        "k/kernel": (6, 2, 4),
        "b_0/x": (7,),
        "b_1/x": (7,),
    }
    arrays = drawn(**ours)
    rules = [
        Rule("layers/w", "layers.{i}.weight", axes=(1, 0), stacked=True),
        Rule("out/kernel", "out.weight", axes=(2, (0, 1))),
        Rule("q/kernel", "qk", axes=((1, 2), 0), part=(0, 2)),
        Rule("k/kernel", "qk", axes=((1, 2), 0), part=(1, 2)),
        Rule("b_{n}/x", "b.{n}.x"),
    ]
    theirs = {f"layers.{i}.weight": (5, 2) for i in range(3)}
    theirs |= {"out.weight": (6, 8), "qk": (16, 6), "b.0.x": (7,), "b.1.x": (7,)}
    mapping = RuleMap(rules, ours, theirs)
    there = mapping.to_torch(arrays)
    assert shapes(there) == theirs
    assert np.array_equal(there["layers.1.weight"], arrays["layers/w"][1].T)
    assert there["out.weight"][5, 1 * 4 + 3] == arrays["out/kernel"][1, 3, 5]
    assert there["qk"][8 + 1 * 4 + 2, 5] == arrays["k/kernel"][5, 1, 2]
    back = mapping.to_jax(there)
    assert back.keys() == arrays.keys()
    assert all(np.array_equal(back[path], arrays[path]) for path in arrays)


def test_names_that_are_not_mapped_are_listed_on_both_sides():
    with pytest.raises(ValueError, match=r"JAX: b, c\. .*PyTorch: y, z\. .*not in PyTorch: w$"):
        RuleMap(
            [Rule("a", "x"), Rule("d", "w")],
            dict.fromkeys("abcd", (1,)),
            dict.fromkeys("xyz", (1,)),
        )


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([Rule("a", "x"), Rule("a", "y")], "the jax parameter 'a' more than once"),
        ([Rule("a", "x"), Rule("b", "x")], "the torch parameter 'x' more than once"),
        ([Rule("nowhere", "x")], "no JAX parameter fits the rule for 'nowhere'; there are: a, b"),
        ([Rule("a", "x", axes=(1, 0)), Rule("b", "y")], r"maps to \(3, 2\), but x is \(2, 3\)"),
        ([Rule("a", "x", axes=(0, 0)), Rule("b", "y")], "name each of its axes once"),
        ([Rule("a", "x", stacked=True), Rule("b", "y")], "needs one placeholder in 'x'"),
    ],
    ids=["twice in JAX", "twice in PyTorch", "no such name", "shape", "axes", "no counter"],
)
def test_a_wrong_rule_is_named(rules, message):
    with pytest.raises(ValueError, match=message):
        RuleMap(rules, {"a": (2, 3), "b": (4,)}, {"x": (2, 3), "y": (4,)})


def test_any_tree_is_named_and_rebuilt():
    tree = {"layers": [{"w": np.ones(2)}, {"w": np.zeros(2)}], "head": (np.ones(1),)}
    arrays = named_arrays(tree)
    assert list(arrays) == ["head/0", "layers/0/w", "layers/1/w"]
    again = rebuilt(tree, {path: array + 1 for path, array in arrays.items()})
    assert isinstance(again["head"], tuple)
    assert again["layers"][1]["w"].tolist() == [1, 1]
