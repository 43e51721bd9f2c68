"""The project as a whole: its package, its pins, its README, and the tools of the tests."""

import re
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from packaging.requirements import Requirement

import jax_accum

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.iterdir()
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_wheel_holds_both_packages_with_their_types_and_no_tests(wheel):
    names = wheel.namelist()
    (metadata,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    assert {name.split("/")[0] for name in names} == {"jax_accum", "torch_ref", metadata}
    sources = {
        str(path.relative_to(ROOT))
        for package in ("jax_accum", "torch_ref")
        for path in (ROOT / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert {"jax_accum/py.typed", "torch_ref/py.typed"} <= sources <= set(names)
    assert f"{metadata}/licenses/LICENSE" in names


def test_the_wheel_has_the_version_of_the_package_and_the_console_script(wheel):
    (prefix,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    assert f"\nVersion: {jax_accum.__version__}\n" in wheel.read(f"{prefix}/METADATA").decode()
    scripts = wheel.read(f"{prefix}/entry_points.txt").decode()
    assert "jax-accum = jax_accum.cli:main" in scripts


def test_importing_jax_accum_loads_nothing_of_the_extras(run_python):
    program = "import sys, jax_accum; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = set(run_python(program).split())
    assert "jax_accum" in loaded
    extras = {"equinox", "flax", "matplotlib", "orbax", "rich", "torch", "torch_ref", "typer"}
    assert not loaded & extras


def pins(version: str) -> dict[str, str]:
    """What constraints.txt pins on that Python: release by package."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found: dict[str, str] = {}
    for line in lines:
        if not line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", line
        environment = {"python_version": version, "python_full_version": f"{version}.0"}
        if requirement.marker is None or requirement.marker.evaluate(environment):
            assert requirement.name not in found, f"{requirement.name} is pinned twice"
            found[requirement.name] = specifier.version
    return found


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_every_dependency_is_pinned_to_a_release_that_is_allowed(version):
    pinned = pins(version)
    needed = [*PROJECT["dependencies"]]
    for extra, requirements in PROJECT["optional-dependencies"].items():
        if extra != "crosscheck" or version == "3.11":
            needed += requirements
    for requirement in map(Requirement, needed):
        assert pinned[requirement.name] in requirement.specifier, requirement


def test_the_oldest_jax_is_pinned_on_3_11_and_the_newest_after_it():
    assert pins("3.11")["jax"].startswith("0.10.")
    assert pins("3.12")["jax"] == pins("3.13")["jax"]
    assert pins("3.13")["jax"].startswith("0.12.")
    assert "torch" in pins("3.11")
    assert "torch" not in pins("3.13")


def test_pins_of_two_versions_are_merged_with_markers(run_python, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("JAX==1\nsame_one==3\ntorch==5+cpu\nonly.old==7\n", encoding="utf-8")
    new.write_text("jax==2\nsame-one==3\n-e /somewhere\n", encoding="utf-8")
    merged = run_python(ROOT / "scripts" / "merge_pins.py", str(old), str(new)).splitlines()
    assert [line for line in merged if not line.startswith("#")] == [
        'jax==1; python_version < "3.12"',
        'jax==2; python_version >= "3.12"',
        "only-old==7",
        "same-one==3",
        'torch==5; python_version == "3.11"',
    ]


def test_the_readmes_examples_run_as_they_stand(capsys):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", readme, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    # "The same parameters, up to rounding". Adam's first update hardly depends on the size of a
    # gradient; its first moment is a tenth of it. The largest is a sum of at most eight terms,
    # in two orders.
    moments = [optax.tree.get(names[state], "mu")["table_VxV"] for state in ("opt_state", "state")]
    one_call, across_calls = moments
    rounding = 8 * jnp.finfo(jnp.float32).eps * jnp.abs(one_call).max()
    assert jnp.abs(one_call - across_calls).max() < rounding
    assert jnp.abs(one_call).max() > 0
    updated = [names[tree]["table_VxV"] for tree in ("new_params", "accumulated")]
    for table in updated:
        assert jnp.abs(table - names["params"]["table_VxV"]).max() > 0.9e-3
    assert "'updates': 1" in capsys.readouterr().out


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_the_commands_of_the_documents_are_targets_of_the_makefile(document):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^ +|`)make ([a-z-]+)", text, flags=re.MULTILINE))
    assert "test" in named
    assert named <= targets


def test_a_program_of_its_own_sees_as_many_devices_as_asked_for(run_python):
    program = "import jax, os; print(jax.device_count(), os.environ['GREETING'])"
    assert run_python(program, devices=8, GREETING="hello") == "8 hello\n"


def test_a_program_that_fails_fails_the_test_with_its_output(run_python):
    with pytest.raises(pytest.fail.Exception, match=r"exit status 3; .*\nthe last words"):
        run_python("import sys; print('the last words'); sys.exit(3)")


def test_a_warning_in_a_program_fails_the_test(run_python):
    with pytest.raises(pytest.fail.Exception, match="UserWarning: careful"):
        run_python("import warnings; warnings.warn('careful')")


def test_a_program_that_hangs_is_ended_with_what_it_started(run_python):
    program = (
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '120'])\n"
        "print('started', flush=True); time.sleep(120)\n"
    )
    began = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=r"ran past 10 seconds.*\nstarted"):
        run_python(program, timeout=10)
    # The child has the program's output open, and reading that ends when the child does.
    assert time.monotonic() - began < 60


def test_64_bit_types_are_on_inside_the_fixture_alone(request):
    assert jnp.ones(1, float).dtype == jnp.float32
    request.getfixturevalue("x64")
    assert jnp.ones(1, float).dtype == jnp.float64
    assert jax.config.jax_enable_x64
