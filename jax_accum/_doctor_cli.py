"""The commands `jax-accum doctor` and `jax-accum preflight`.

`add_commands(app)` puts them into a Typer application. FOUND is a fault, or something wrong without
a name.
"""

# No postponed annotations here: typer reads them. What needs JAX is imported where it is used.
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from jax_accum._by_name import find_function
from jax_accum._statuses import FINE, FOUND, bad_input

if TYPE_CHECKING:
    import typer

DOCTOR_EXAMPLE = "jax-accum doctor train.py:doctor_case"
PREFLIGHT_EXAMPLE = "jax-accum preflight train.py:doctor_case --record record.json"


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

    @app.command("doctor", epilog=f"\b\nExample: {DOCTOR_EXAMPLE}")
    def doctor(
        name: target = None,
        symptom: Annotated[
            str | None, typer.Option(help="What you see; “list” shows the names.")
        ] = None,
        json_: as_json = False,
    ) -> None:
        """Name the accumulation fault in a training step.

        Exit status 0: right, 1: a fault, or unknown, 2: bad input.
        """
        raise typer.Exit(_guarded(lambda: run_doctor(name, symptom, json_)))

    @app.command("preflight", epilog=f"\b\nExample: {PREFLIGHT_EXAMPLE}")
    def preflight(
        name: target = None,
        record: Annotated[
            Path | None, typer.Option(help="A saved run record that the lines are added to.")
        ] = None,
        json_: as_json = False,
    ) -> None:
        """Check one update on a little real data before a long run.

        Exit status 0: passed, 1: something to look at, 2: bad input.
        """
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
            return FINE
    diagnosis = diagnose(**load(name))
    _print(diagnosis.to_json() if as_json else str(diagnosis))
    return FINE if diagnosis.right else FOUND


def run_preflight(name: str | None, record: Path | None, as_json: bool) -> int:
    """Prints the lines of a preflight; returns the exit status."""
    from jax_accum import RunRecord
    from jax_accum.doctor import preflight

    kept = None if record is None else RunRecord.load(record)
    given = load(name)
    if "update" not in given:
        raise ValueError(
            f"{name} returned a gradient alone: a preflight runs whole updates. Return "
            "(update, case)."
        )
    result = preflight(**given, record=kept)
    if kept is not None and record is not None:
        kept.save(record)
    _print(result.to_json() if as_json else str(result))
    return FINE if result.passed else FOUND


def load(name: str | None) -> dict[str, Any]:
    """The arguments that MODULE:NAME makes.

    Raises:
      ValueError: there is no such thing, or it makes something else.
    """
    if name is None:
        raise ValueError("MODULE:NAME is missing: give a function that returns (update, case).")
    made = find_function(name, "argument")()
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
        return bad_input(error)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
