"""The command line: what it takes, what it answers, its exit statuses."""

import importlib.util
import json
import shlex

import pytest
from typer.testing import CliRunner

import jax_accum
from jax_accum import cli
from jax_accum.crosscheck import run
from jax_accum.crosscheck.cases import make_matrix
from jax_accum.crosscheck.data import WINDOW
from jax_accum.crosscheck.faults import FAULTS
from jax_accum.crosscheck.gpt import GPTSizes


@pytest.fixture
def small(monkeypatch):
    """Models so small that a case takes a second or two."""
    sizes = GPTSizes(max_length=WINDOW, layers=1, heads=2, width=8)
    real = run.Crosscheck

    def make(documents, updates, seed=0, fault=None):
        return real(documents, updates, seed, fault, sizes)

    monkeypatch.setattr(run, "Crosscheck", make)


@pytest.fixture
def text(tmp_path):
    """Paragraphs of very different length."""
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join("word " * (1 + 7 * i % 40) for i in range(1, 40)))
    return path


def test_equal_is_status_0_with_a_table_a_sentence_and_a_report(small, text, tmp_path, capsys):
    folder = tmp_path / "out"
    names = ["sgd-float32-a4-across", "sgd-float64-a4-inone"]
    arguments = ["--text", str(text), "--case", *names, "--updates", "2", "--report", str(folder)]
    assert cli.main(["crosscheck", *arguments]) == 0
    said = capsys.readouterr().out
    for name in names:
        assert name in said
    assert "trained the same in all 2 cases" in " ".join(said.split())
    assert json.loads((folder / "report.json").read_text())["verdict"] == "equal"
    assert (folder / "report.html").exists()


def test_the_example_of_the_help_text_works(small, text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text.rename(tmp_path / "chapter1.txt")
    assert cli.main(["crosscheck", "--help"]) == 0
    last = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert cli.main(shlex.split(last.removeprefix("  Example: jax-accum "))) == 0
    assert (tmp_path / "crosscheck-report" / "report.html").exists()


def test_a_planted_fault_is_status_1_and_names_what_left_its_tolerance(
    small, text, tmp_path, capsys
):
    arguments = ["--text", str(text), "--plant", "divided-twice", "--microbatches", "4"]
    arguments += ["--case", "sgd-float32-a4-across", "--updates", "1", "--report", str(tmp_path)]
    assert cli.main(["crosscheck", *arguments]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "gradient at update 1 (JAX) is off by 7.5e-01, where rounding allows" in said
    assert FAULTS["divided-twice"].meaning in said
    command = json.loads((tmp_path / "report.json").read_text())["command"]
    assert command == (
        f"jax-accum crosscheck --text {text} --case sgd-float32-a4-across --microbatches 4 "
        "--plant divided-twice --updates 1"
    )


def test_an_interrupt_is_status_130_and_what_was_found_is_written(
    small, text, tmp_path, capsys, monkeypatch
):
    real = run.Crosscheck

    def make(*arguments):
        crosscheck = real(*arguments)
        compare = crosscheck.compare

        def interrupted(case):
            if case.dtype == "float64":
                raise KeyboardInterrupt
            return compare(case)

        crosscheck.compare = interrupted
        return crosscheck

    monkeypatch.setattr(run, "Crosscheck", make)
    monkeypatch.setattr(run, "WORKERS", 1)
    names = ["sgd-float32-a4-across", "sgd-float64-a4-across"]
    arguments = ["--text", str(text), "--case", *names, "--updates", "1", "--report", str(tmp_path)]
    assert cli.main(["crosscheck", *arguments]) == 130
    assert "cut short" in " ".join(capsys.readouterr().out.split())
    data = json.loads((tmp_path / "report.json").read_text())
    assert not data["complete"]
    assert {case["name"] for case in data["cases"]} <= {names[0]}


BAD = {
    "a missing file": (["--text", "none.txt"], "'none.txt' does not exist"),
    "an empty file": (["--text", "empty.txt"], "'empty.txt' is empty"),
    "not UTF-8": (["--text", "latin.txt"], "'latin.txt' is not UTF-8"),
    "a document of one token": (["--text", "short.txt"], "document 'short.txt:2' has 1 token"),
    "an unknown case": (["--case", "sgd"], "unknown case 'sgd'"),
    "an unknown fault": (["--plant", "gremlin"], "unknown fault 'gremlin'"),
    "A of zero": (["--microbatches", "0"], "--microbatches must be from 1"),
    "A below zero": (["--microbatches=-2"], "--microbatches must be from 1"),
    "A that is no number": (["--microbatches", "four"], "a valid integer"),
    "no updates": (["--updates", "0"], "--updates must be from 1"),
    "too many updates": (["--updates", "51"], "--updates must be from 1 to 50"),
    "a negative seed": (["--seed", "-1"], "--seed must be from 0"),
    "a report folder that is a file": (["--report", "empty.txt"], "'empty.txt' is a file"),
    "a report folder below a file": (["--report", "empty.txt/x"], "is not writable"),
    "a field that no line has": (["--jsonl", "a.jsonl", "--field", "b"], "no field 'b'"),
    "JSON Lines without a field": (["--jsonl", "a.jsonl"], "--field"),
    "text and JSON Lines": (["--text", "short.txt", "--jsonl", "a.jsonl"], "do not go together"),
    "an unknown option": (["--colour"], "--colour"),
    "a stray argument": (["stray"], "stray"),
    "a fault that cannot show": (
        ["--plant", "partial-dropped", "--microbatches", "1"],
        "cannot show",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_clear_line_and_status_2(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "short.txt").write_text("long enough\n\nx\n\nlong enough")
    (tmp_path / "a.jsonl").write_text('{"a": "text"}\n')
    assert cli.main(["crosscheck", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("jax-accum: ")
    assert message in said.err


@pytest.mark.parametrize("package", ["typer", "torch", "flax", "rich", "matplotlib"])
def test_a_package_that_is_not_installed_is_named_with_the_extra(
    package, monkeypatch, capsys, tmp_path
):
    real = importlib.util.find_spec

    def find(name, *rest):
        return None if name == package else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    assert cli.main(["crosscheck", "--report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "pip install 'jax-accum[crosscheck]'" in said
    assert package in said.lower().replace("pytorch", "torch")


def test_the_list_names_every_case_and_every_fault(capsys):
    assert cli.main(["crosscheck", "--list"]) == 0
    said = capsys.readouterr().out
    for name in [case.name for case in make_matrix()] + list(FAULTS):
        assert name in said


def test_the_list_follows_the_number_of_microbatches(capsys):
    assert cli.main(["crosscheck", "--list", "--microbatches", "2", "3"]) == 0
    said = capsys.readouterr().out
    assert "sgd-float32-a3-across" in said
    assert "-a4-" not in said


def test_the_version_is_that_of_the_package(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"jax-accum {jax_accum.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["crosscheck", "--help"]])
def test_help_tells_the_options(arguments):
    result = CliRunner().invoke(cli.make_app(), arguments)
    assert result.exit_code == 0
    assert "crosscheck" in result.output
    if len(arguments) > 1:
        for option in ("--text", "--jsonl", "--case", "--plant", "--report", "--updates", "--seed"):
            assert option in result.output
