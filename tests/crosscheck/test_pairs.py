"""Pairs of somebody's own models: equal, differing, not finite, not comparable, badly given."""

import dataclasses
import importlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_accum as ja
from jax_accum import cli, crosscheck
from jax_accum.crosscheck import Pair, Rule, check_pair, pair_run
from jax_accum.crosscheck.compare import first_failure
from jax_accum.crosscheck.layer_maps import dense

EXAMPLES = Path(__file__).parents[2] / "examples" / "pairs"
RANDOM = np.random.default_rng(0)
BATCH = {
    "x": RANDOM.standard_normal((6, 3)),
    "y": RANDOM.standard_normal((6, 2)),
    "weight": np.array([1, 0, 3, 2, 0, 5]),
}


def jax_loss(params, batch):
    error = batch["x"] @ params["kernel"] + params["bias"] - batch["y"]
    return ja.Weighted(jnp.sum(batch["weight"][:, None] * error**2), jnp.sum(batch["weight"]))


def torch_loss(module, batch):
    error = module(batch["x"]) - batch["y"]
    return (batch["weight"][:, None] * error**2).sum(), batch["weight"].sum()


@pytest.fixture(scope="module")
def pair():
    return Pair(
        jax_loss=jax_loss,
        torch_module=lambda: torch.nn.Linear(3, 2),
        torch_loss=torch_loss,
        weights={"kernel": RANDOM.standard_normal((3, 2)), "bias": RANDOM.standard_normal(2)},
        rules=dense("", ""),
        batches=[BATCH, BATCH],
        microbatches=(3,),
        optimizers=("sgd",),
    )


def test_a_pair_that_is_the_same_is_equal_in_every_case(pair):
    seen = []
    result = check_pair(pair, lambda case, findings: seen.append(case.name))
    assert (result.verdict, result.equal) == ("equal", True), result.sentence
    names = [f"sgd-float{n}-a3-{way}" for n in (32, 64) for way in ("across", "inone")]
    assert seen == list(result.findings) == names


def test_a_mean_of_means_on_the_pytorch_side_is_seen_only_when_the_batch_is_cut(pair):
    def wrong(module, batch):
        total, weight = torch_loss(module, batch)
        return total / weight, 1

    result = check_pair(dataclasses.replace(pair, torch_loss=wrong, ways=("inone",)))
    assert result.verdict == "differ"
    assert "(PyTorch) is off by" in result.sentence
    # Each precision by itself: what rounding may do is never measured by the mistake.
    for case, findings in result.findings.items():
        assert first_failure(findings).side == "PyTorch", case


@pytest.fixture(scope="module")
def of_two_terms(pair):
    """Terms with denominators of their own; a microbatch without weight has no finite loss."""

    def ours(params, batch):
        total, weight = jax_loss(params, batch)
        rows = jnp.sum(batch["weight"] > 0)
        hole = jnp.where(rows > 0, 0, jnp.nan) * jnp.sum(params["bias"])
        output = batch["x"] @ params["kernel"]
        size = jnp.sum(jnp.where(batch["weight"] > 0, jnp.sum(output**2, axis=1), 0))
        return {"error": ja.Weighted(total + hole, weight), "size": ja.Weighted(size + hole, rows)}

    def theirs(module, batch):
        total, weight = torch_loss(module, batch)
        rows = (batch["weight"] > 0).sum()
        hole = torch.where(rows > 0, 0, torch.nan) * module.bias.sum()
        output = (batch["x"] @ module.weight.T).square().sum(dim=1)
        size = torch.where(batch["weight"] > 0, output, 0).sum()
        return {"error": (total + hole, weight), "size": (size + hole, rows)}

    return dataclasses.replace(
        pair,
        jax_loss=ours,
        torch_loss=theirs,
        batches=[BATCH | {"weight": np.array([1, 0, 0, 0, 2, 5])}] * 2,
        coefficients={"size": 0.25},
        ways=("inone",),
    )


def test_terms_with_denominators_of_their_own_and_a_microbatch_without_weight(of_two_terms):
    result = check_pair(of_two_terms)
    assert result.verdict == "equal", result.sentence


def test_terms_across_calls_are_refused_with_what_to_give_instead(of_two_terms):
    with pytest.raises(ValueError, match=r"\['error', 'size'\].*give ways=\('inone',\)"):
        check_pair(dataclasses.replace(of_two_terms, ways=("across",)))


@pytest.mark.parametrize("side", ["jax", "torch"])
def test_in_float64_microbatches_put_together_are_the_undivided_batch(of_two_terms, side):
    runs = getattr(pair_run._PairRun(of_two_terms), side)
    pieces, whole = runs.pieces("sgd", 3, "float64"), runs.undivided("sgd", "float64")
    np.testing.assert_allclose(pieces.losses, whole.losses, rtol=1e-12)
    for path, array in whole.parameters[-1].items():
        np.testing.assert_allclose(pieces.parameters[-1][path], array, rtol=1e-12)


def test_models_that_differ_are_told_so_and_accumulation_is_not_tried(pair, monkeypatch):
    def other(module, batch):
        total, weight = torch_loss(module, batch)
        return total * (1 + 1e-9), weight

    monkeypatch.setattr(pair_run._PairRun, "compare", None)
    result = check_pair(dataclasses.replace(pair, torch_loss=other))
    assert result.verdict == "models differ"
    assert result.sentence.startswith("The models differ, accumulation was not tried: loss at")
    assert result.findings == {}


@pytest.mark.parametrize("side", ["JAX", "PyTorch"])
def test_a_gradient_that_is_not_finite_is_named_with_its_place(pair, side):
    def ours(params, batch):
        total, weight = jax_loss(params, batch)
        return ja.Weighted(total + jnp.sum(jnp.sqrt(params["bias"] * 0)), weight)

    def theirs(module, batch):
        total, weight = torch_loss(module, batch)
        return total + torch.sqrt(module.bias * 0).sum(), weight

    changed = {"jax_loss": ours} if side == "JAX" else {"torch_loss": theirs}
    result = check_pair(dataclasses.replace(pair, **changed))
    assert result.verdict == "not finite"
    assert f"the gradient of bias at update 1 ({side}) is not finite" in result.sentence


def test_a_gradient_that_is_nan_in_one_microbatch_alone_is_named(pair):
    def theirs(module, batch):
        total, weight = torch_loss(module, batch)
        hole = torch.sqrt((weight - 5).abs() * module.bias.square().sum())
        return total + (hole - hole if len(batch["x"]) < 6 else 0), weight

    result = check_pair(dataclasses.replace(pair, torch_loss=theirs, ways=("inone",)))
    assert result.verdict == "differ"
    assert "the gradient of 'bias' is not finite" in result.sentence


def test_names_without_a_counterpart_are_listed(pair):
    with pytest.raises(ValueError, match=r"Not mapped in JAX: bias\. Not mapped in PyTorch: bias"):
        check_pair(dataclasses.replace(pair, rules=dense("", "", bias=False)))


BAD = {
    "no batches": ({"batches": []}, "batches is empty"),
    "a batch that is no dict": ({"batches": [np.ones(3)]}, "batch 0 must be a dict of arrays"),
    "arrays of different length": (
        {"batches": [BATCH | {"x": np.ones((4, 3))}]},
        "arrays of different length",
    ),
    "A that does not divide": ({"microbatches": (4,)}, "4, which does not divide the 6 examples"),
    "no A": ({"microbatches": ()}, "microbatches is empty"),
    "an unknown optimizer": ({"optimizers": ("lamb",)}, "optimizers must be some of"),
    "an unknown dtype": ({"dtypes": ("bfloat16",)}, "dtypes must be some of"),
    "an unknown way": ({"ways": ()}, "ways must be some of"),
    "weights that are integers": ({"weights": {"n": np.ones(2, int)}}, "'n' of dtype int64"),
    "no weights": ({"weights": {}}, "weights holds no arrays"),
}


@pytest.mark.parametrize(("changed", "message"), BAD.values(), ids=BAD)
def test_a_pair_that_is_badly_given_is_refused(pair, changed, message):
    with pytest.raises((ValueError, TypeError), match=message):
        dataclasses.replace(pair, **changed)


def test_pair_and_its_check_are_importable_from_the_package():
    assert crosscheck.Pair is Pair
    assert crosscheck.Rule is Rule
    with pytest.raises(AttributeError, match="no attribute 'Pear'"):
        crosscheck.Pear  # noqa: B018


def check(target, tmp_path, capsys):
    status = cli.main(["crosscheck", "--pair", str(target), "--report", str(tmp_path)])
    said = capsys.readouterr()
    return status, " ".join((said.out + said.err).split())


def test_digits_in_a_convolutional_net_are_equal(tmp_path, capsys):
    pytest.importorskip("sklearn")
    status, said = check(f"{EXAMPLES / 'digits.py'}:pair", tmp_path, capsys)
    assert status == 0, said
    assert "trained the same in all 4 cases" in said
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["verdict"] == "equal"
    assert len(data["cases"]) == 4


def test_digits_with_a_batch_norm_are_equal_in_eval_mode_and_not_comparable_in_training(
    tmp_path, capsys
):
    pytest.importorskip("sklearn")
    status, said = check(f"{EXAMPLES / 'digits_batch_norm.py'}:in_eval_mode", tmp_path, capsys)
    assert status == 0, said
    status, said = check(f"{EXAMPLES / 'digits_batch_norm.py'}:in_training_mode", tmp_path, capsys)
    assert status == 1
    assert "Not comparable: norm is a batch norm in training mode" in said


def test_rounding_that_grows_when_a_compiler_sums_up_fewer_rows_is_no_difference(monkeypatch):
    """From these weights, JAX is 6 times less exact with 8 rows than with 32, before any sum."""
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(EXAMPLES)
    module = importlib.import_module("digits_batch_norm")
    weights = module.Net().init(jax.random.key(17), np.zeros((1, 8, 8, 1), np.float32))["params"]
    changed = dataclasses.replace(
        module.in_eval_mode(), weights=weights, microbatches=(4,), dtypes=("float32",)
    )
    result = check_pair(changed)
    assert result.verdict == "equal", result.sentence


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing", "is not MODULE:NAME"),
        ("none.py:pair", "there is no file none.py"),
        ("no_such_module_here:pair", "cannot be imported"),
        ("json:pear", "json has no 'pear'"),
        ("json:JSONDecoder", "give a jax_accum.crosscheck.Pair"),
    ],
)
def test_a_target_that_is_no_pair_is_one_line_and_status_2(target, message, tmp_path, capsys):
    status, said = check(target, tmp_path, capsys)
    assert status == 2
    assert said.startswith("jax-accum: --pair")
    assert message in said
