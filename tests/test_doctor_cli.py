"""The commands: exit statuses, JSON, symptoms, one line for bad input."""

import json
import sys

import pytest

import jax_accum as ja
from jax_accum import _doctor_cli
from jax_accum.doctor import SYMPTOMS, _advice, describe
from tests.faults import gallery

typer = pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402 (typer may be missing)

PROGRAM = """
from tests.faults import gallery

wrong = gallery.load("in_jax.not_divided_by_tokens")
right = gallery.load("right_in_jax.optax_microbatching")


def faulty():
    return wrong.update, wrong.case(3)


def good():
    return {"grad": right.grad, "case": right.case(3)}


def number():
    return 3


attribute = 3
"""


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    (tmp_path / "steps_to_examine.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "steps_to_examine", raising=False)
    app = typer.Typer()
    app.callback()(lambda: None)
    _doctor_cli.add_commands(app)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_a_fault_is_exit_status_1_and_a_clean_bill_0(invoke):
    result = invoke("doctor", "steps_to_examine:faulty")
    assert result.exit_code == 1
    assert result.stdout.startswith("Fault: not divided.")
    result = invoke("doctor", "steps_to_examine:good")
    assert result.exit_code == 0
    assert result.stdout.startswith("Right:")


def test_the_answer_is_json_on_request(invoke):
    result = invoke("doctor", "steps_to_examine:faulty", "--json")
    assert json.loads(result.stdout)["fault"] == "not divided"


def test_a_file_is_as_good_as_a_module(invoke, tmp_path):
    path = tmp_path / "steps_to_examine.py"
    assert invoke("doctor", f"{path}:faulty").exit_code == 1


def test_a_file_with_the_name_of_another_module_is_not_mistaken_for_it(invoke, tmp_path):
    (tmp_path / "json.py").write_text(PROGRAM)
    result = invoke("doctor", f"{tmp_path / 'json.py'}:faulty")
    assert result.exit_code == 2
    assert "another module has the name json: rename the file" in result.stderr


def test_symptoms_are_listed_and_lead_to_checks(invoke):
    listed = invoke("doctor", "--symptom", "list").stdout
    for name, symptom in SYMPTOMS.items():
        assert name in listed
        told = invoke("doctor", "--symptom", name)
        assert told.exit_code == 0
        assert symptom.check in told.stdout
        assert set(symptom.causes) <= set(_advice.ADVICE)


def test_every_fault_is_the_cause_of_some_symptom():
    causes = {cause for symptom in SYMPTOMS.values() for cause in symptom.causes}
    assert set(_advice.ADVICE) - causes == {"first microbatch lost", "shift off by one"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["doctor"], "MODULE:NAME is missing"),
        (["doctor", "steps_to_examine"], "is not MODULE:NAME"),
        (["doctor", "no_such_module_here:x"], "no_such_module_here cannot be imported"),
        (["doctor", "nowhere/file.py:x"], "there is no file nowhere/file.py"),
        (["doctor", "steps_to_examine:missing"], "has no 'missing'"),
        (["doctor", "steps_to_examine:attribute"], "is of type int, not a function"),
        (["doctor", "steps_to_examine:number"], "returned int: return (update, case)"),
        (["doctor", "--symptom", "hiccups"], "symptom 'hiccups' is unknown"),
        (["preflight"], "MODULE:NAME is missing"),
        (["preflight", "steps_to_examine:faulty", "--record", "no/record.json"], "no/record.json"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_bad_input_is_one_line_and_exit_status_2(invoke, arguments, said):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


def test_preflight_prints_its_lines_and_adds_them_to_a_record(invoke, tmp_path):
    path = tmp_path / "record.json"
    record = ja.RunRecord(
        plan=ja.BatchPlan(microbatch_size=2, microbatches=4),
        normalisation={"loss": "supervised tokens"},
        optimizer="sgd(0.5)",
        data="drawn",
    )
    record.save(path)
    result = invoke("preflight", "steps_to_examine:faulty", "--record", str(path))
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    assert ja.RunRecord.load(path).preparation[0].startswith("preflight ")
    assert gallery.load("in_jax.not_divided_by_tokens").FAULT == "not divided"


def test_an_unknown_symptom_names_those_there_are():
    with pytest.raises(ValueError, match="there are small-loss"):
        describe("hiccups")
