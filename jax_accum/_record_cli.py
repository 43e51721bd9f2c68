"""`jax-accum record`: show, check and compare the records of runs."""

# No postponed annotations here: typer reads them.
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from jax_accum._statuses import FINE, FOUND, bad_input

if TYPE_CHECKING:
    import typer

SHOW_EXAMPLE = "jax-accum record show run-a/record.json"
VALIDATE_EXAMPLE = "jax-accum record validate run-a/record.json"
DIFF_EXAMPLE = "jax-accum record diff run-a/record.json run-b/record.json"


def make_record_app() -> "typer.Typer":
    """The commands, to be mounted: `app.add_typer(make_record_app(), name="record")`."""
    import typer

    app = typer.Typer(
        name="record",
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Show, check and compare the records of runs.",
        epilog=f"\b\nExample: {DIFF_EXAMPLE}",
    )
    file = Annotated[Path, typer.Argument(metavar="FILE", help="A record: JSON.")]

    @app.command(epilog=f"\b\nExample: {SHOW_EXAMPLE}")
    def show(path: file) -> None:
        """Print a record as a table.

        Exit status 0: done, 2: bad input.
        """
        typer.echo(_load(path).describe())

    @app.command(epilog=f"\b\nExample: {VALIDATE_EXAMPLE}")
    def validate(path: file) -> None:
        """Check a record against the schema; says all that is wrong.

        Exit status 0: valid, 2: not, or no such file.
        """
        _load(path)
        typer.echo(f"{path}: a valid run record")

    @app.command(epilog=f"\b\nExample: {DIFF_EXAMPLE}")
    def diff(
        a: file,
        b: file,
        as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
    ) -> None:
        """Say what makes the loss curves of two runs incomparable, the axis first.

        Exit status 0: comparable, 1: not, 2: bad input.
        """
        found = _load(a).diff(_load(b))
        curves = [difference for difference in found if difference.curves]
        if as_json:
            typer.echo(json.dumps([vars(difference) for difference in found], indent=2))
        else:
            many = "difference" if len(curves) == 1 else "differences"
            verdict = f"not comparable, {len(curves)} {many}" if curves else "comparable"
            typer.echo(f"loss curves: {verdict}")
            for difference in found:
                typer.echo(f"  {'!' if difference.curves else ' '} {difference}")
        raise typer.Exit(FOUND if curves else FINE)

    return app


def _load(path: Path) -> Any:
    import typer

    from jax_accum import RunRecord

    try:
        return RunRecord.load(path)
    except (OSError, ValueError) as error:
        raise typer.Exit(bad_input(error)) from None
