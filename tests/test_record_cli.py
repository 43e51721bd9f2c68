"""`record show`, `validate` and `diff` on the command line."""

import copy
import json

import pytest

import jax_accum as ja


def record(**changes):
    given = {
        "plan": ja.BatchPlan(microbatch_size=2, microbatches=4, replicas=2),
        "normalisation": {"loss": "supervised tokens"},
        "optimizer": "adamw(1e-3)",
        "data": "numbers in order",
        "seed": 0,
    }
    return ja.RunRecord(**{**given, **changes})


@pytest.fixture
def command():
    typer = pytest.importorskip("typer")
    from typer.testing import CliRunner

    from jax_accum._record_cli import make_record_app

    app = typer.Typer()
    app.add_typer(make_record_app(), name="record")

    def run(*arguments):
        return CliRunner().invoke(app, ["record", *map(str, arguments)])

    return run


def test_the_command_compares_two_records(command, tmp_path):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    record().save(a)
    record(seed=2, processes=2).save(b)
    same = command("diff", a, a)
    assert (same.exit_code, same.output) == (0, "loss curves: comparable\n")
    other = command("diff", a, b)
    assert other.exit_code == 1
    assert other.output.startswith("loss curves: not comparable, 1 difference\n  ! seed: 0 and 2.")
    listed = json.loads(command("diff", "--json", a, b).output)
    assert listed[0]["field"] == "seed"


def test_the_command_shows_and_checks_a_record(command, tmp_path):
    path = tmp_path / "a.json"
    record().save(path)
    assert "| plan.replicas | 2 |" in command("show", path).output
    assert "a valid run record" in command("validate", path).output
    data = json.loads(path.read_text())
    wrong = copy.deepcopy(data)
    wrong["schema_version"] = 99
    path.write_text(json.dumps(wrong))
    refused = command("validate", path)
    assert refused.exit_code == 2
    assert "schema_version is 99" in refused.output
    assert command("show", tmp_path / "none.json").exit_code == 2
