"""The ``jax-accum`` command: argument parsing, exit statuses, one-line errors.

Exit statuses: 0 fine, 1 what the command is there to find, 2 bad input (one line on stderr), 130
interrupted. Nothing heavy is imported until a command needs it, so that ``--help`` is quick.
"""

# No postponed annotations here: typer reads them, and inside a function it could not find its own.
import importlib.util
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from jax_accum._statuses import BAD_INPUT, FINE, INSTALL, INTERRUPTED, bad_input

if TYPE_CHECKING:
    import typer

EXAMPLE = "jax-accum doctor --symptom nan"
# Options that take several values at once: `--text a.txt b.txt` is `--text a.txt --text b.txt`.
SEVERAL = ("--text", "--case", "--microbatches")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      arguments: without the program's name; those of the process by default.

    Returns:
      the exit status.
    """
    if importlib.util.find_spec("typer") is None:
        return bad_input(f"the command line needs typer, which is not installed: {INSTALL}")
    import typer

    given = list(sys.argv[1:] if arguments is None else arguments)
    command = typer.main.get_command(make_app())
    try:
        status = command.main(spread(given), prog_name="jax-accum", standalone_mode=False)
    except typer.Abort:
        return INTERRUPTED
    except Exception as error:
        # Typer carries a Click of its own and does not export the error of a wrong option.
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        message = describe()
        if message.startswith("Usage:"):  # nothing was given: the help itself
            sys.stderr.write(message + "\n")
            return BAD_INPUT
        return bad_input(f"{message} (--help shows the options)")
    return status if isinstance(status, int) else FINE


def make_app() -> "typer.Typer":
    """The commands, as a Typer application."""
    import typer

    from jax_accum import _crosscheck_cli, _doctor_cli, _plan_cli, _record_cli

    app = typer.Typer(
        name="jax-accum",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help="Gradient accumulation for JAX, shown to be right against PyTorch.",
        epilog=f"\b\nExample: {EXAMPLE}",
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            from jax_accum import __version__

            typer.echo(f"jax-accum {__version__}")
            raise typer.Exit

    @app.callback()
    def root(
        version: Annotated[
            bool,
            typer.Option(
                "--version", callback=show_version, is_eager=True, help="Show the version."
            ),
        ] = False,
    ) -> None:
        del version

    _crosscheck_cli.add_command(app)
    app.command("plan", epilog=f"\b\nExample: {_plan_cli.EXAMPLE}")(_plan_cli.plan)
    _doctor_cli.add_commands(app)
    app.add_typer(_record_cli.make_record_app(), name="record")
    return app


def spread(arguments: Sequence[str]) -> list[str]:
    """Repeats the options of `SEVERAL` before each value that follows them.

    >>> spread(["crosscheck", "--text", "a", "b", "--seed", "1"])
    ['crosscheck', '--text', 'a', '--text', 'b', '--seed', '1']
    """
    result: list[str] = []
    option: str | None = None
    values = 0
    for argument in arguments:
        if argument.startswith("-") and argument != "-":
            option, values = (argument if argument in SEVERAL else None), 0
            result.append(argument)
            continue
        if option is not None and values:
            result.append(option)
        result.append(argument)
        values += 1
    return result
