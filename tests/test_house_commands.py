"""The environment that make builds, with stand-ins for Python: nothing is installed here."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What the scripts need besides Python; PATH has these alone, and so no real Python.
TOOLS = ["awk", "bash", "cat", "cksum", "cp", "date", "dirname", "env", "grep", "head", "kill"]
TOOLS += ["ln", "make", "mkdir", "readlink", "rm", "sh", "sleep", "timeout", "touch"]

# Answers as Python does to what the scripts ask of it. `-m venv` puts a copy of itself into the
# environment; `-m pip` writes down its arguments, and fails as BROKEN says. Anything else is a tool
# that is run, and ends with TOOL_STATUS.
PYTHON = """\
#!/bin/sh
version={version}
case "$*" in
    *ensurepip*) echo "$version"; exit {probe} ;;
    *sys.version_info*) echo "$version" ;;
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo venv >>"$LOG" ;;
    "-m pip "*)
        echo "$*" >>"$LOG"
        case "${{BROKEN:-}}" in
            killed) kill -9 $PPID ;;
            failed) exit 1 ;;
        esac ;;
    *) echo "ran: $*" >>"$LOG"; exit "${{TOOL_STATUS:-9}}" ;;
esac
"""


class House:
    """A copy of the build files, and a PATH on which only stand-ins for Python are found."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        self.bin = folder / "bin"
        self.log = folder / "log"
        self.venv = self.root / ".venv"
        self.bin.mkdir()
        self.log.touch()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        for name in (".ci", "scripts"):
            shutil.copytree(ROOT / name, self.root / name)
        for name in ("Makefile", "constraints.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root)

    def python(self, name: str, version: str, *, venv: bool = True) -> Path:
        """Put a stand-in on PATH; without `venv`, one whose ensurepip is missing."""
        path = self.bin / name
        path.write_text(PYTHON.format(version=version, probe=int(not venv)), encoding="utf-8")
        path.chmod(0o755)
        return path

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        settings = {"PATH": str(self.bin), "HOME": str(self.root), "LOG": str(self.log)}
        return subprocess.run(
            command,
            cwd=self.root,
            env={**settings, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )

    def calls(self) -> list[str]:
        """What the stand-ins did since this was last asked."""
        lines = self.log.read_text(encoding="utf-8").splitlines()
        self.log.write_text("", encoding="utf-8")
        return lines


@pytest.fixture
def house(tmp_path):
    return House(tmp_path)


@pytest.mark.parametrize(
    ("pythons", "said"),
    [
        pytest.param({}, "Python 3.11 or newer is needed (none found)", id="no Python at all"),
        pytest.param({"python3": "3.10"}, "is needed (python3 is Python 3.10)", id="one too old"),
        pytest.param({"python": "2.7"}, "is needed (python is Python 2.7)", id="Python 2"),
    ],
)
@pytest.mark.parametrize("target", ["crosscheck", "test"])
def test_a_python_too_old_gets_one_line_that_says_what_to_install(house, target, pythons, said):
    for name, version in pythons.items():
        house.python(name, version)
    done = house.run("make", target)
    assert done.returncode == 2
    assert done.stdout == ""
    line, makes_own = done.stderr.splitlines()
    assert said in line
    assert "apt install python3.11" in line
    assert makes_own.startswith("make: ***")
    assert not house.venv.exists()


@pytest.mark.parametrize("target", ["crosscheck", "test"])
def test_a_python_without_venv_gets_one_line_that_says_what_to_install(house, target):
    house.python("python3", "3.11", venv=False)
    done = house.run("make", target)
    assert done.returncode == 2
    line, _ = done.stderr.splitlines()
    assert "apt install python3.11-venv" in line
    assert not house.venv.exists()


@pytest.mark.parametrize("given", ["python3.9", "missing"])
def test_the_interpreter_that_was_asked_for_is_not_replaced_by_another(house, given):
    house.python("python3.11", "3.11")
    house.python("python3.9", "3.9")
    done = house.run("make", "venv", f"PYTHON={given}")
    assert done.returncode == 2
    assert given in done.stderr.splitlines()[0]


def test_python_3_11_is_preferred_because_it_has_pytorch(house):
    house.python("python3", "3.13")
    house.python("python3.11", "3.11")
    done = house.run("scripts/find_python.sh", "3.11", "3.12", "3.13")
    assert done.stdout == f"{house.bin}/python3.11\n"


def test_an_interpreter_that_does_not_run_is_passed_over(house):
    house.python("python3.11", "3.11", venv=False)
    (house.bin / "python3.12").write_text("#!/bin/sh\nexit 127\n", encoding="utf-8")
    (house.bin / "python3.12").chmod(0o755)
    house.python("python3", "3.13")
    done = house.run("scripts/find_python.sh", "3.11", "3.12", "3.13")
    assert done.stdout == f"{house.bin}/python3\n"


def test_an_interpreter_of_pyenv_is_found(house):
    python = house.python("python", "3.13")
    theirs = house.root / ".pyenv" / "versions" / "3.13.5" / "bin"
    theirs.mkdir(parents=True)
    python.rename(theirs / "python")
    done = house.run("scripts/find_python.sh", "3.13")
    assert done.stdout == f"{theirs}/python\n"


@pytest.mark.parametrize(
    ("version", "extras"),
    [("3.11", "crosscheck,checkpoint,dev"), ("3.12", "checkpoint,dev"), ("3.13", "checkpoint,dev")],
)
def test_everything_is_installed_as_pinned_and_pytorch_on_3_11_alone(house, version, extras):
    house.python("python3", version)
    assert house.run("make", "venv").returncode == 0
    made, *installs = house.calls()
    assert made == "venv"
    assert all("--constraint constraints.txt" in line for line in installs)
    assert installs[-1].endswith(f"--editable .[{extras}]")


def test_a_second_call_installs_nothing_and_a_changed_pin_does(house):
    house.python("python3", "3.11")
    house.run("make", "venv")
    house.calls()
    assert house.run("make", "venv").returncode == 0
    assert house.calls() == []
    with (house.root / "constraints.txt").open("a", encoding="utf-8") as file:
        file.write("another==1\n")
    assert house.run("make", "venv").returncode == 0
    calls = house.calls()
    assert any("--editable" in line for line in calls)
    assert "venv" not in calls
    house.run("make", "venv")
    assert house.calls() == []


@pytest.mark.parametrize("how", ["failed", "killed"])
@pytest.mark.parametrize("when", ["first", "renewed"])
def test_an_interrupted_installation_is_not_taken_for_complete(house, how, when):
    house.python("python3", "3.11")
    if when == "renewed":
        house.run("make", "venv")
        (house.root / "constraints.txt").write_text("another==1\n", encoding="utf-8")
    assert house.run("make", "venv", BROKEN=how).returncode != 0
    house.calls()
    assert house.run("make", "venv").returncode == 0
    made, *installs = house.calls()
    assert made == "venv"
    assert "--editable" in installs[-1]
    assert not Path(f"{house.venv}.lock").is_symlink()


def test_another_python_makes_the_environment_anew(house):
    house.python("python3.11", "3.11")
    house.python("python3.13", "3.13")
    house.run("make", "venv")
    house.calls()
    assert house.run("make", "venv", "PYTHON=python3.13").returncode == 0
    assert house.calls()[0] == "venv"
    house.run("make", "venv")  # whatever is there serves when none is asked for
    assert house.calls() == []


def test_an_environment_of_somebody_else_is_left_alone(house):
    house.python("python3", "3.11")
    theirs = house.venv / "bin" / "python"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs", encoding="utf-8")
    done = house.run("make", "venv")
    assert done.returncode == 2
    assert "was not made by this Makefile" in done.stderr
    assert theirs.read_text(encoding="utf-8") == "theirs"
    assert house.calls() == []


def test_a_second_make_waits_for_the_first_one(house):
    house.python("python3", "3.11")
    lock = Path(f"{house.venv}.lock")
    with subprocess.Popen(["sleep", "30"]) as other:
        lock.symlink_to(str(other.pid))
        settings = {"PATH": str(house.bin), "HOME": str(house.root), "LOG": str(house.log)}
        waiting = subprocess.Popen(["make", "venv"], cwd=house.root, env=settings)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(timeout=2)
        assert house.calls() == []
        other.kill()
    # The process that held the lock is gone, and its lock is taken over.
    assert waiting.wait(timeout=20) == 0
    assert "venv" in house.calls()


def test_the_crosscheck_says_that_it_needs_3_11_where_pytorch_is_left_out(house):
    house.python("python3", "3.13")
    done = house.run("make", "crosscheck")
    assert done.returncode == 2
    assert "pinned for Python 3.11" in done.stderr


def test_the_tests_of_jax_alone_run_where_pytorch_is_left_out(house):
    house.python("python3", "3.13")
    done = house.run("make", "test")
    assert "the tests of JAX alone" in done.stdout
    (command,) = [line for line in house.calls() if line.startswith("ran: -m pytest")]
    assert "--ignore=tests/torch_ref --ignore=tests/crosscheck" in command
    assert done.returncode == 2
    assert os.access(house.venv / "bin" / "python", os.X_OK)


def test_make_alone_lists_every_command(house):
    listed = house.run("make").stdout.splitlines()
    assert {line.split()[1] for line in listed} == {
        *("help", "venv", "crosscheck", "test", "test-jax", "lint", "format", "bench", "docs"),
        "clean",
        "pretrained",
    }


def test_lint_runs_all_its_tools_and_fails_when_one_does(house):
    house.python("python3", "3.11")
    done = house.run("make", "lint")  # the stand-in fails whatever it is asked to lint
    assert done.returncode == 2
    ran = [line.split()[2] for line in house.calls() if line.startswith("ran: -m ")]
    assert ran == ["ruff", "ruff", "mypy"]


def test_ci_stops_at_what_fails_and_says_what_it_was(house):
    house.python("python3", "3.11")
    done = house.run(".ci/run", TOOL_STATUS="1")
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == "==> FAILED with exit status 2: make lint"
    assert not any("pytest" in line for line in house.calls())


def test_ci_runs_lint_and_tests_and_says_what_it_left_out(house):
    house.python("python3", "3.11")
    done = house.run(".ci/run", TOOL_STATUS="0")
    assert done.returncode == 0
    assert "Left out: Python 3.13" in done.stdout.splitlines()[-1]
    tools = [line.split()[2] for line in house.calls() if line.startswith("ran: -m ")]
    assert tools == ["ruff", "ruff", "mypy", "pytest"]


def test_ci_runs_the_tests_of_jax_alone_on_3_13_in_an_environment_of_its_own(house):
    house.python("python3", "3.11")
    house.python("python3.13", "3.13")
    done = house.run(".ci/run", TOOL_STATUS="0")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].endswith("the tests of JAX alone on Python 3.13")
    calls = house.calls()
    assert calls.count("venv") == 2
    assert "--editable .[checkpoint,dev]" in calls[-2]
    assert "--ignore=tests/torch_ref" in calls[-1]
    assert (house.root / ".venv-py313" / "complete").exists()


def test_ci_builds_and_installs_the_package_on_3_12_as_well(house):
    house.python("python3", "3.11")
    house.python("python3.12", "3.12")
    assert house.run(".ci/run", TOOL_STATUS="0").returncode == 0
    calls = house.calls()
    assert calls.count("venv") == 2
    assert calls[-1].endswith("-k test_package")
    assert (house.root / ".venv-py312" / "complete").exists()
