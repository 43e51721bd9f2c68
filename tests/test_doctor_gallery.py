"""Every fault of the gallery in JAX is named, and every correct recipe gets a clean bill."""

import json
import re
from pathlib import Path

import pytest

from tests.faults import gallery, matrix

FAULTS = gallery.names("JAX", faulty=True)
RIGHT = gallery.names("JAX", faulty=False)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_gallery_is_named(name):
    matrix.check("JAX", name, fewest=2)


@pytest.mark.parametrize("name", RIGHT)
def test_a_correct_recipe_of_the_gallery_gets_a_clean_bill(name):
    matrix.check("JAX", name, fewest=1)


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


def test_the_gallery_is_asked_for_as_many_seeds_as_wanted_and_what_was_said_is_kept(
    monkeypatch, tmp_path
):
    asked = []
    monkeypatch.setattr(matrix, "answer", lambda module, seed, options: asked.append(seed) or "no")
    monkeypatch.setenv("GALLERY_SEEDS", "50")
    monkeypatch.setenv("GALLERY_ROWS", str(tmp_path / "rows"))
    with pytest.raises(AssertionError, match="'no': 50"):
        matrix.check("JAX", "in_jax.divided_twice", fewest=2)
    assert asked == list(range(50))
    (row,) = json.loads((tmp_path / "rows" / "in_jax.divided_twice.json").read_text("utf-8"))
    assert (row["truth"], row["said"]) == ("divided twice", {"no": 50})


def test_the_picture_shows_a_wrong_answer_in_a_column_of_its_own(tmp_path):
    pytest.importorskip("matplotlib")
    row = {"framework": "JAX", "dtype": "float32", "truth": "divided twice"}
    matrix.draw([row | {"said": {"divided twice": 50}}], tmp_path)
    good = (tmp_path / matrix.PICTURE).read_text("utf-8")
    matrix.draw([row | {"said": {"divided twice": 49, "mean of means": 1}}], tmp_path)
    bad = (tmp_path / matrix.PICTURE).read_text("utf-8")
    assert "<!-- mean of means -->" in bad
    assert "<!-- mean of means -->" not in good


def test_table_and_picture_of_the_docs_are_of_the_whole_gallery_and_of_one_run():
    docs = Path(__file__).parents[1] / "docs"
    page = (docs / "doctor.md").read_text("utf-8")
    table = page.partition(matrix.BEGIN)[2].partition(matrix.END)[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if " | `" in line]
    steps = {(framework, step.strip("`")) for _, framework, _, step, _ in rows}
    assert steps == {
        (framework, name.partition(".")[2])
        for framework in gallery.FOLDERS
        for faulty in (True, False)
        for name in gallery.names(framework, faulty=faulty)
    }
    total = sum(int(part.rpartition(": ")[2]) for *_, said in rows for part in said.split(", "))
    assert f" of {total} answers right" in table
    picture = (docs / "_static" / matrix.PICTURE).read_text("utf-8")
    shown = re.findall(r"<!-- (.*?) -->", picture)
    names = {truth for truth, *_ in rows}
    said = {part.rpartition(": ")[0] for *_, said in rows for part in said.split(", ")}
    assert {name for name in shown if not name.isdigit()} == names | said | {
        "unknown",
        "what was there",
        "what the doctor said",
    }
    assert sum(int(number) for number in shown if number.isdigit()) == total
