"""The package as users get it: built, installed beside its runtime dependencies alone, typed."""

import ast
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import jax_accum as ja

ROOT = Path(__file__).parents[1]
EXTRAS = ["equinox", "flax", "grain", "matplotlib", "orbax", "pytest", "rich", "torch", "typer"]

# What a user's program does first; it ends with what it found of the extras.
PROGRAM = f"""
import importlib.util, pathlib, sys
import jax, jax.numpy as jnp, optax
import jax_accum as ja

def loss_fn(w, batch):
    return ja.Weighted(jnp.sum((w - batch) ** 2), batch.size)

tx = ja.guard(optax.sgd(0.5))
step = ja.make_train_step(loss_fn, tx, 2)
w = jnp.zeros(())
w, state, metrics = step(w, tx.init(w), jnp.array([1.0, 2.0, 3.0, 6.0]))
group = next(ja.groups([{{"x": jnp.arange(3.0)}}], ja.BatchPlan(microbatch_size=2, microbatches=2)))
assert (float(w), ja.counts(state)["updates"], group.partial) == (3.0, 1, True)
for name in ja.__all__:
    getattr(ja, name)
print(pathlib.Path(ja.__file__).parents[1].name, ja.__version__)
print([name for name in {EXTRAS!r} if importlib.util.find_spec(name) is not None])
"""


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """A wheel, and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", str(folder))
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return {"wheel": wheel, "source distribution": sdist}


def needed(name: str, seen: set[str]) -> Iterator[importlib.metadata.Distribution]:
    """The installed distribution of that name, and all that it needs without its extras."""
    if (key := re.sub(r"[-_.]+", "-", name).lower()) in seen:
        return
    seen.add(key)
    found = importlib.metadata.distribution(name)
    yield found
    for requirement in map(Requirement, found.requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield from needed(requirement.name, seen)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory) -> Path:
    """A folder with links to what jax, numpy and optax consist of and need, and nothing else."""
    folder = tmp_path_factory.mktemp("runtime")
    seen: set[str] = set()
    for name in ("jax", "numpy", "optax"):
        for distribution in needed(name, seen):
            for file in distribution.files or ():
                top = file.parts[0]
                if top not in ("..", "__pycache__") and not (folder / top).exists():
                    (folder / top).symlink_to(distribution.locate_file(top))
    assert not seen & {"flax", "torch", "typer"}
    return folder


@pytest.fixture(scope="module", params=["wheel", "source distribution"])
def installed(request, built, runtime, tmp_path_factory) -> tuple[Path, Path]:
    """An environment of its own: its interpreter, and the folder of its packages."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))
    python = folder / "venv" / "bin" / "python"
    target = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    # The build backend is the one of this environment: nothing is downloaded.
    pip += ["--no-build-isolation", "--no-compile", "--disable-pip-version-check"]
    run(*pip, "--target", str(target), str(built[request.param]), PIP_NO_CACHE_DIR="1")
    (target / "runtime.pth").write_text(f"{runtime}\n", encoding="utf-8")
    return python, target


def test_it_trains_in_an_environment_with_its_runtime_dependencies_alone(installed):
    python, target = installed
    where, extras = run(str(python), "-I", "-W", "error", "-c", PROGRAM).splitlines()
    assert where == f"{target.name} {ja.__version__}"
    assert extras == "[]"


def test_the_command_says_what_to_install_where_the_extra_is_missing(installed):
    python, target = installed
    done = subprocess.run(
        [str(python), "-I", "-m", "jax_accum", "crosscheck"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "pip install 'jax-accum[crosscheck]'" in line
    assert (target / "bin" / "jax-accum").exists()


def test_the_source_distribution_has_what_the_tests_and_pages_need_and_no_leftovers(built):
    with tarfile.open(built["source distribution"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "pyproject.toml",
        "constraints.txt",
        "Makefile",
    }
    assert wanted <= names
    assert {"docs/index.md", "tests/conftest.py", "examples/train_gpt.py"} <= names
    assert not [name for name in names if "docs/_build" in name or "__pycache__" in name]


RIGHT = """\
import jax
import jax.numpy as jnp
import optax
import jax_accum as ja


def loss_fn(params: jax.Array, batch: jax.Array) -> ja.Weighted:
    return ja.Weighted(jnp.sum((params - batch) ** 2), batch.size)


plan: ja.BatchPlan = ja.BatchPlan(microbatch_size=2, microbatches=4)
n: int = plan.examples_per_update
opt = ja.MultiSteps(optax.sgd(0.1), every_k_schedule=4)
params = jnp.zeros(())
state = opt.init(params)
params, state = opt.apply(params, state, params, weight=3)
total: dict[str, int] = ja.counts(state)
step = ja.make_train_step(loss_fn, ja.guard(optax.sgd(0.1)), plan.microbatches)
group: ja.Group = next(ja.groups([{"x": 1}], plan))
ids: tuple[object, ...] = group.ids
loss: ja.Weighted = ja.losses.softmax_cross_entropy(jnp.zeros((1, 2)), jnp.zeros(1, int))
"""
WRONG = {
    'ja.BatchPlan(microbatch_size="2", microbatches=4)': "arg-type",
    "ja.MultiSteps(optax.sgd(0.1), 4, weight=3)": "call-arg",
    "x: int = ja.counts(state)": "assignment",
    "ja.micro_steps(4)": "attr-defined",
}


def test_a_users_file_is_checked_against_the_types_of_the_package(tmp_path):
    pytest.importorskip("mypy")
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(RIGHT, encoding="utf-8")
    wrong.write_text(RIGHT + "\n".join(WRONG) + "\n", encoding="utf-8")
    # Only our types are looked at: to read all of JAX takes most of a minute.
    settings = tmp_path / "mypy.ini"
    settings.write_text(
        "[mypy]\nfollow_imports = silent\nignore_missing_imports = True\n"
        "[mypy-jax.*,jaxlib.*,numpy.*,optax.*,torch.*,flax.*]\nfollow_imports = skip\n",
        encoding="utf-8",
    )
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--no-error-summary"]
    done = subprocess.run(
        [*mypy, "--cache-dir", str(tmp_path / "cache"), str(right), str(wrong)],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    found = re.findall(r"(\w+)\.py:(\d+): error: .*\[([\w-]+)\]", done.stdout)
    first = len(RIGHT.splitlines()) + 1
    assert found == [("wrong", str(first + i), code) for i, code in enumerate(WRONG.values())]


def test_public_names_are_sorted_exist_and_are_no_others_than_all():
    assert len(set(ja.__all__)) == len(ja.__all__)
    assert list(ja.__all__) == sorted(ja.__all__)
    assert not [name for name in ja.__all__ if not hasattr(ja, name)]
    assert sorted(dir(ja)) == ja.__all__
    visible = {name for name in vars(ja) if not name.startswith("_")}
    # Modules that were imported by something become attributes; what is public says __all__.
    modules = {name for name in visible if type(getattr(ja, name)).__name__ == "module"}
    assert visible - modules == set(ja.__all__) - modules - {"__version__"}


def test_a_name_is_imported_when_it_is_asked_for(run_python):
    program = """if True:
        import copy, pickle, sys
        import jax_accum as ja
        before = set(sys.modules)
        assert not before & {"jax", "numpy", "optax", "jax_accum._plan", "jax_accum.memory"}, before
        from jax_accum import BatchPlan, memory
        assert BatchPlan is ja.BatchPlan is vars(ja)["BatchPlan"]
        assert memory is ja.memory is sys.modules["jax_accum.memory"]
        assert {"BatchPlan", "memory"} <= set(dir(ja))
        plan = BatchPlan(microbatch_size=2, microbatches=3)
        assert pickle.loads(pickle.dumps([plan, BatchPlan])) == [plan, BatchPlan]
        names = {}
        exec("from jax_accum import *", names)
        assert set(ja.__all__) == set(names) - {"__builtins__"}
        assert all(names[name] is getattr(ja, name) for name in ja.__all__)
        try:
            ja.multi_steps
        except AttributeError as error:
            assert error.name == "multi_steps" and error.obj is ja
            print(error)
    """
    assert run_python(program) == "module 'jax_accum' has no attribute 'multi_steps'\n"


def test_type_checkers_and_programs_are_told_of_the_same_names():
    """The imports that type checkers read are those that are made when a name is asked for."""
    tree = ast.parse(Path(ja.__file__).read_text(encoding="utf-8"))
    (checked,) = [node for node in tree.body if isinstance(node, ast.If) and not node.orelse][:1]
    assert ast.unparse(checked.test) == "typing.TYPE_CHECKING"
    for node in checked.body:
        for alias in node.names:
            home = importlib.import_module(node.module)
            expected = (
                importlib.import_module(f"{node.module}.{alias.name}")
                if (node.module == "jax_accum")
                else getattr(home, alias.name)
            )
            assert getattr(ja, alias.name) is expected
    names = {alias.name for node in checked.body for alias in node.names}
    assert names == set(ja.__all__) - {"__version__"}
