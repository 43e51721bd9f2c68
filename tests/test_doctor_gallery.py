"""Every fault of the gallery in JAX is named, and every correct recipe gets a clean bill."""

import ml_dtypes
import numpy as np
import pytest

from tests.faults import gallery, matrix

FAULTS = gallery.names("JAX", faulty=True)
RIGHT = gallery.names("JAX", faulty=False)
SEEDS = (0, 1)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name):
    module = gallery.load(name)
    assert [gallery.examine(module, seed).fault for seed in SEEDS] == [module.FAULT] * len(SEEDS)


@pytest.mark.parametrize("name", RIGHT)
def test_a_correct_recipe_gets_a_clean_bill(name):
    module = gallery.load(name)
    for dtype in getattr(module, "DTYPES", [np.float32, ml_dtypes.bfloat16]):
        found = gallery.examine(module, 0, dtype=dtype)
        assert found.right, found


def test_the_gallery_and_the_advice_know_the_same_faults():
    from jax_accum.doctor import _advice, _names

    known = {v for k, v in vars(_names).items() if k.isupper()}
    assert known == set(_advice.ADVICE)
    assert {gallery.load(name).FAULT for name in FAULTS} <= known


def test_the_matrix_counts_what_was_said_and_fails_on_a_wrong_name(monkeypatch):
    module = gallery.load("in_jax.not_divided_by_tokens")
    monkeypatch.setattr(
        matrix.gallery,
        "names",
        lambda framework, faulty: ["in_jax.not_divided_by_tokens"] if faulty else [],
    )
    (row,) = matrix.measure("JAX", range(2))
    assert row["said"] == {"not divided": 2}
    assert "2 of 2 answers right, 0 unknown, 0 wrong" in matrix.table([row])
    monkeypatch.setattr(module, "FAULT", "mean of means")
    (row,) = matrix.measure("JAX", range(1))
    assert "0 of 1 answers right, 0 unknown, 1 wrong" in matrix.table([row])
