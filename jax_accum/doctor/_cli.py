"""The commands `jax-accum doctor` and `jax-accum preflight`.

`add_commands(app)` puts them into a Typer application. Exit statuses: 0 nothing found, 1 a fault,
or something wrong without a name, 2 bad input (one line on stderr).
"""

# No postponed annotations here: typer reads them.
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    import typer

BAD_INPUT = 2


def add_commands(app: "typer.Typer") -> None:
    """Adds both commands."""
    import typer

    target = Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE:NAME",
            help="A function without arguments that returns (update, case), or a dict of "
            "diagnose's arguments. MODULE is importable, or a path that ends in .py.",
        ),
    ]
    as_json = Annotated[bool, typer.Option("--json", help="Print a JSON object.")]

    @app.command("doctor")
    def doctor(
        name: target = None,
        symptom: Annotated[
            str | None, typer.Option(help="What you see; “list” shows the names.")
        ] = None,
        json_: as_json = False,
    ) -> None:
        """Name the accumulation fault in a training step."""
        raise typer.Exit(_guarded(lambda: run_doctor(name, symptom, json_)))

    @app.command("preflight")
    def preflight(
        name: target = None,
        record: Annotated[
            Path | None, typer.Option(help="A saved run record that the lines are added to.")
        ] = None,
        json_: as_json = False,
    ) -> None:
        """Check one update on a little real data before a long run."""
        raise typer.Exit(_guarded(lambda: run_preflight(name, record, json_)))


def run_doctor(name: str | None, symptom: str | None, as_json: bool) -> int:
    """Prints a symptom's check, or a diagnosis; returns the exit status."""
    from jax_accum.doctor import SYMPTOMS, describe, diagnose

    if symptom is not None:
        if symptom == "list":
            _print("\n".join(f"{key:15} {value.seen}" for key, value in SYMPTOMS.items()))
        else:
            _print(describe(symptom))
        if name is None:
            return 0
    diagnosis = diagnose(**load(name))
    _print(diagnosis.to_json() if as_json else str(diagnosis))
    return 0 if diagnosis.right else 1


def run_preflight(name: str | None, record: Path | None, as_json: bool) -> int:
    """Prints the lines of a preflight; returns the exit status."""
    from jax_accum import RunRecord
    from jax_accum.doctor import preflight

    kept = None if record is None else RunRecord.load(record)
    result = preflight(**load(name), record=kept)
    if kept is not None and record is not None:
        kept.save(record)
    _print(result.to_json() if as_json else str(result))
    return 0 if result.passed else 1


def load(name: str | None) -> dict[str, Any]:
    """The arguments that MODULE:NAME makes.

    Raises:
      ValueError: there is no such thing, or it makes something else.
    """
    if name is None:
        raise ValueError("MODULE:NAME is missing: give a function that returns (update, case).")
    module_name, colon, attribute = name.rpartition(":")
    if not colon or not module_name or not attribute:
        raise ValueError(f"{name!r} is not of the form MODULE:NAME, such as train:doctor_case.")
    if module_name.endswith(".py"):
        path = Path(module_name)
        if not path.is_file():
            raise ValueError(f"there is no file {module_name}.")
        sys.path.insert(0, str(path.parent.resolve()))
        module_name = path.stem
    elif "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{module_name} cannot be imported: {error}") from error
    make = getattr(module, attribute, None)
    if make is None or not callable(make):
        raise ValueError(f"{module_name} has no function {attribute}.")
    made = make()
    if isinstance(made, tuple) and len(made) == 2:
        return {"update": made[0], "case": made[1]}
    if isinstance(made, Mapping) and "case" in made:
        return dict(made)
    raise ValueError(
        f"{name} returned {type(made).__name__}: return (update, case), or a dict with “case” and "
        "“update” or “grad”."
    )


def _guarded(run: Callable[[], int]) -> int:
    try:
        return run()
    except (ValueError, TypeError, OSError, json.JSONDecodeError) as error:
        sys.stderr.write(f"jax-accum: {' '.join(str(error).split())}\n")
        return BAD_INPUT


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
