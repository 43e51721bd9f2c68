"""The plan command: its table, picture and snippet, and its words for bad input."""

import re

import optax
import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
import typer
from typer.testing import CliRunner

from jax_accum import BatchPlan, _plan_cli

OWN = """
import jax, jax.numpy as jnp, optax
import jax_accum as ja

def make(plan):
    def loss_fn(w, x):
        return ja.Weighted(jnp.sum(jnp.tanh(x @ w) ** 2), x.shape[0])
    w = jax.ShapeDtypeStruct((8, 512), "float32")
    x = jax.ShapeDtypeStruct((plan.examples_per_replica, 8), "float32")
    tx = optax.sgd(0.1)
    return ja.make_train_step(loss_fn, tx, plan.microbatches), (w, tx.init(w), x)

number = 3
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs `plan` in a folder that has a module of the user's own."""
    (tmp_path / "own_step_for_plan.py").write_text(OWN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(_plan_cli.plan)
    return lambda *arguments: CliRunner().invoke(app, arguments)


OF_OWN = ("--make", "own_step_for_plan:make", "--examples", "4")


def test_a_plan_for_the_users_own_step_with_picture_caveat_and_a_snippet_that_runs(
    command, tmp_path
):
    result = command(*OF_OWN, "--budget", "1MiB", "--plot", "peaks.png")
    assert result.exit_code == 0, result.output
    assert re.search(r"^ +4 +1 .* yes .* <-$", result.output, flags=re.MULTILINE)
    assert "run this once on the GPU itself" in result.output
    assert (tmp_path / "peaks.png").read_bytes()[:4] == b"\x89PNG"
    assert list((tmp_path / "cache" / "jax-accum" / "memory").glob("*.json"))
    pasted = result.output.split("To paste:\n\n")[1].split("\n\nPicture")[0]
    names = {"loss_fn": lambda w, x: None, "tx": optax.sgd(0.1)}
    exec(pasted, names)
    assert names["plan"] == BatchPlan(microbatch_size=4, microbatches=1)
    again = command(*OF_OWN, "--budget", "1MiB")
    assert "(cached)" in again.output
    assert command(*OF_OWN, "--budget", "1MiB", "--no-cache").output.count("(cached)") == 0


def test_over_replicas_the_snippet_names_the_mesh(command):
    said = _plan_cli.snippet(BatchPlan(microbatch_size=2, microbatches=3, replicas=4))
    assert "replicas=4" in said
    assert "plan.microbatches, mesh=mesh)  # 24 examples per update" in said


def test_when_nothing_fits_the_status_is_1_and_the_advice_is_there(command):
    result = command(*OF_OWN, "--budget", "9kB")
    assert result.exit_code == 1
    assert "Nothing fits: the parameters alone take 16.0 KiB" in result.stderr


BAD = {
    "budget cannot be read": ("--budget", "much"),
    "does not say how much memory": (),
    "--preset must be one of gpt-tiny": ("--preset", "gpt-5", "--budget", "1GiB"),
    "--make 'own_step_for_plan' is not MODULE:NAME": (
        "--make",
        "own_step_for_plan",
        "--budget",
        "1GiB",
    ),
    "No module named": ("--make", "no_such_module:make", "--budget", "1GiB"),
    "has no 'absent'": ("--make", "own_step_for_plan:absent", "--budget", "1GiB"),
    "is of type int, not a function": ("--make", "own_step_for_plan:number", "--budget", "1GiB"),
    "cannot be written": (*OF_OWN, "--budget", "1GiB", "--plot", "absent/peaks.png"),
    "examples_per_update must be": ("--examples", "0", "--budget", "1GiB"),
    "cannot be shared evenly": ("--examples", "3", "--replicas", "2", "--budget", "1GiB"),
}


def test_a_picture_without_matplotlib_is_refused_before_anything_is_compiled(command, monkeypatch):
    find = _plan_cli.importlib.util.find_spec
    monkeypatch.setattr(
        _plan_cli.importlib.util,
        "find_spec",
        lambda name: None if name == "matplotlib" else find(name),
    )
    result = command(*OF_OWN, "--budget", "1GiB", "--plot", "peaks.png")
    assert result.exit_code == 2
    assert result.stderr.startswith("jax-accum: --plot needs matplotlib")


@pytest.mark.parametrize(("message", "arguments"), BAD.items(), ids=BAD)
def test_bad_input_is_one_line_and_status_2(command, message, arguments):
    result = command(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("jax-accum: ")
    assert len(result.stderr.splitlines()) == 1
