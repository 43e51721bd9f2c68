"""`jax-accum record`: show, check and compare the records of runs.

Exit statuses: 0 fine (of `diff`: comparable), 1 loss curves not comparable, 2 bad input.
"""

# No postponed annotations here: typer reads them.
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    import typer

NOT_COMPARABLE = 1
BAD_INPUT = 2


def make_record_app() -> "typer.Typer":
    """The commands, to be mounted: `app.add_typer(make_record_app(), name="record")`."""
    import typer

    app = typer.Typer(
        name="record",
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Show, check and compare the records of runs.",
    )
    file = Annotated[Path, typer.Argument(metavar="FILE", help="A record: JSON.")]

    @app.command()
    def show(path: file) -> None:
        """Print a record as a table."""
        typer.echo(_load(path).describe())

    @app.command()
    def validate(path: file) -> None:
        """Check a record against the schema; says all that is wrong."""
        _load(path)
        typer.echo(f"{path}: a valid run record")

    @app.command()
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
        raise typer.Exit(NOT_COMPARABLE if curves else 0)

    return app


def _load(path: Path) -> Any:
    import typer

    from jax_accum import RunRecord

    try:
        return RunRecord.load(path)
    except (OSError, ValueError) as error:
        print(f"jax-accum: {error}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(BAD_INPUT) from None
