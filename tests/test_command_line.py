"""The command line as a whole: quick help, examples that work, completion, one set of statuses."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jax_accum as ja

typer = pytest.importorskip("typer")

from jax_accum import cli  # noqa: E402 (typer may be missing)

ROOT = Path(__file__).parents[1]
HEAVY = ("jax", "jaxlib", "matplotlib", "numpy", "optax", "rich", "torch")


def all_commands(group=None, path=()) -> dict[tuple[str, ...], object]:
    """Every command and group of commands, by the words that call it."""
    command = typer.main.get_command(cli.make_app()) if group is None else group
    found = {path: command}
    for name, child in getattr(command, "commands", {}).items():
        found |= all_commands(child, (*path, name))
    return found


COMMANDS = all_commands()

# What a user has: a trainer with a function for the doctor and one for plan, records of two runs.
TRAIN = """
import jax, jax.numpy as jnp, numpy as np, optax
import jax_accum as ja


def loss_fn(w, batch):
    return ja.losses.softmax_cross_entropy(batch["x"] @ w, batch["labels"])


def case():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, (24, 4))
    labels[np.arange(4) >= rng.integers(1, 5, (24, 1))] = -100
    x = rng.normal(size=(24, 4, 5)).astype(np.float32)
    return ja.doctor.Case(
        params=rng.normal(size=(5, 3)).astype(np.float32),
        examples=[{"x": a, "labels": b} for a, b in zip(x, labels, strict=True)],
        loss_fn=loss_fn,
        labels="labels",
        recipe=ja.doctor.Recipe("sgd", learning_rate=0.5),
    )


def right(params, microbatches):
    loss = ja.Weighted(0.0, 0.0)
    for batch in microbatches:
        loss += loss_fn(params, batch)
    return loss.mean


def wrong(params, microbatches):
    return sum(loss_fn(params, batch).mean for batch in microbatches) / len(microbatches)


def update(loss):
    def run(params, state, microbatches):
        return params - 0.5 * jax.grad(loss)(params, microbatches), state

    return run


def doctor_case():
    return update(right), case()


def doctor_fault():
    return update(wrong), case()


def gradient_alone():
    return {"grad": jax.grad(right), "case": case()}


def make(plan):
    def total(w, x):
        return ja.Weighted(jnp.sum(jnp.tanh(x @ w) ** 2), x.shape[0])

    w = jax.ShapeDtypeStruct((8, 512), "float32")
    x = jax.ShapeDtypeStruct((plan.examples_per_replica, 8), "float32")
    tx = optax.sgd(0.1)
    return ja.make_train_step(total, tx, plan.microbatches), (w, tx.init(w), x)


def interrupted(*given):
    raise KeyboardInterrupt
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a trainer and its records, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    plan = ja.BatchPlan(microbatch_size=2, microbatches=4)
    given = {"normalisation": {"loss": "tokens"}, "optimizer": "sgd(0.5)", "data": "drawn"}
    for name in (".", "run-a", "run-b"):
        (tmp_path / name).mkdir(exist_ok=True)
        ja.RunRecord(plan=plan, **given).save(tmp_path / name / "record.json")
    (tmp_path / "run-c").mkdir()
    ja.RunRecord(plan=plan, **given, seed=2).save(tmp_path / "run-c" / "record.json")
    yield tmp_path
    sys.modules.pop("train", None)


def help_of(path, capsys) -> str:
    assert cli.main([*path, "--help"]) == 0
    return capsys.readouterr().out


def test_the_commands_are_those_that_the_tests_below_know():
    names = {" ".join(path) for path in COMMANDS} - {"", "record"}
    records = {"record show", "record validate", "record diff"}
    assert names == {"crosscheck", "doctor", "plan", "preflight"} | records


def test_help_and_version_import_nothing_heavy(run_python):
    program = (
        "import contextlib, io, sys\n"
        "from jax_accum.cli import main\n"
        f"for arguments in {[*map(list, COMMANDS)]!r}:\n"
        "    for asked in [*arguments, '--help'], ['--version']:\n"
        "        with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "            assert main(asked) == 0\n"
        "        assert out.getvalue().strip()\n"
        f"        print(*asked, *{{*sys.modules}} & {{*{HEAVY!r}}})\n"
    )
    asked = [line for path in COMMANDS for line in (" ".join([*path, "--help"]), "--version")]
    assert run_python(program).splitlines() == asked


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_help_ends_with_an_example_of_its_command(path, capsys):
    last = help_of(path, capsys).rstrip().splitlines()[-1]
    assert last.startswith(f"  Example: {' '.join(['jax-accum', *path])} ")


@pytest.mark.parametrize(
    "path", [path for path in COMMANDS if path != ("crosscheck",)], ids=" ".join
)
def test_the_example_of_a_help_text_works(path, capsys, project):
    if path == ("plan",):
        pytest.importorskip("flax")
    example = help_of(path, capsys).rstrip().splitlines()[-1].removeprefix("  Example: jax-accum ")
    assert cli.main(shlex.split(example)) == 0
    said = capsys.readouterr()
    assert said.out.strip()
    assert said.err == ""


OWN = "plan --make train:make --examples 4 --no-cache"
STATUSES = {
    0: [
        "--version",
        "doctor train.py:doctor_case",
        "doctor --symptom list",
        "preflight train:doctor_case",
        f"{OWN} --budget 1MiB",
        "record show run-a/record.json",
        "record validate run-a/record.json",
        "record diff run-a/record.json run-b/record.json",
    ],
    1: [
        "doctor train.py:doctor_fault",
        "preflight train.py:doctor_fault",
        f"{OWN} --budget 9kB",
        "record diff run-a/record.json run-c/record.json",
    ],
    2: [
        "",
        "record",
        "nosuch",
        "--colour",
        "doctor",
        "doctor train.py",
        "doctor train.py:absent",
        "doctor absent.py:doctor_case",
        "doctor --symptom hiccups",
        "preflight",
        "preflight train.py:gradient_alone",
        "preflight train.py:doctor_case --record absent.json",
        f"{OWN} --budget much",
        "plan --make train:absent --budget 1MiB",
        "plan --examples many",
        "record show absent.json",
        "record show train.py",
        "record validate train.py",
        "record diff run-a/record.json",
        "record diff run-a/record.json absent.json",
    ],
    130: ["doctor train.py:interrupted", "plan --make train:interrupted"],
}


@pytest.mark.parametrize(
    ("line", "status"),
    [(line, status) for status, lines in STATUSES.items() for line in lines],
    ids=lambda given: given if given != "" else "nothing",
)
def test_the_exit_status_is_0_fine_1_found_2_bad_input_130_interrupted(
    line, status, project, capsys
):
    if status == 130 and line.startswith("plan"):
        line += " --budget 1MiB"
    assert cli.main(shlex.split(line)) == status
    said = capsys.readouterr()
    if status == 2 and line in ("", "record"):  # the help, but not as an answer that was asked for
        assert said.out == ""
        assert "Commands:" in said.err
    elif status == 2:
        assert said.out == ""
        assert said.err.startswith("jax-accum: ")
        assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["rec"], ["record"]),
        (["p"], ["plan", "preflight"]),
        (["record", ""], ["show", "validate", "diff"]),
        (["plan", "--b"], ["--budget"]),
    ],
    ids=str,
)
def test_the_completion_that_bash_installs_offers_commands_and_options(words, offered, tmp_path):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    command = tmp_path / "jax-accum"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m jax_accum "$@"\n')
    command.chmod(0o755)
    line = " ".join(f"'{word}'" for word in ["jax-accum", *words])
    script = f"""
        PATH="{tmp_path}:$PATH"
        eval "$(jax-accum --show-completion)"
        set -- $(complete -p jax-accum)
        while [ "$1" != -F ]; do shift || exit 1; done
        COMP_WORDS=({line}) COMP_CWORD={len(words)}
        "$2" jax-accum
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == offered, done.stderr
