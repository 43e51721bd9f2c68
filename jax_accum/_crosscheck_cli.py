"""`jax-accum crosscheck`: its options, all checked before anything slow is imported."""

# No postponed annotations here: typer reads them. What needs JAX is imported where it is used.
import contextlib
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jax_accum._statuses import FINE, INSTALL, bad_input

if TYPE_CHECKING:
    import typer

EXAMPLE = "jax-accum crosscheck --text chapter1.txt --case sgd-float32-a4-across --updates 2"


def add_command(app: "typer.Typer") -> None:
    """Adds the command."""
    import typer

    @app.command(epilog=f"\b\nExample: {EXAMPLE}")
    def crosscheck(
        text: Annotated[
            list[Path] | None,
            typer.Option(
                metavar="FILE...",
                help="Plain text, gzip or not: a paragraph of one file, or each of several files, "
                "is a document. By default, Python's own help topics.",
            ),
        ] = None,
        jsonl: Annotated[
            Path | None, typer.Option(metavar="FILE", help="JSON Lines: a document a line.")
        ] = None,
        field: Annotated[
            str | None, typer.Option(metavar="NAME", help="The field of --jsonl with the text.")
        ] = None,
        case: Annotated[
            list[str] | None,
            typer.Option(metavar="NAME...", help="Only these cases (see --list)."),
        ] = None,
        pair: Annotated[
            str | None,
            typer.Option(
                metavar="MODULE:NAME",
                help="Check a model of your own: a jax_accum.crosscheck.Pair, or a function that "
                "returns one. MODULE is importable, or a path that ends in .py.",
            ),
        ] = None,
        full: Annotated[
            bool,
            typer.Option(
                "--full",
                help="Also sharded jit, shard_map and pmap, PyTorch in two processes, narrow "
                "dtypes, skips, several loss terms: some minutes.",
            ),
        ] = False,
        microbatches: Annotated[
            list[int] | None,
            typer.Option(
                metavar="A...", help="Cut groups into A microbatches, instead of 1, 4 and 8."
            ),
        ] = None,
        list_: Annotated[bool, typer.Option("--list", help="List cases and faults, run none.")] = (
            False
        ),
        plant: Annotated[
            str | None,
            typer.Option(metavar="FAULT", help="Run one side with a known fault (see --list)."),
        ] = None,
        report: Annotated[
            Path, typer.Option(metavar="DIR", help="Folder that the report is written to.")
        ] = Path("crosscheck-report"),
        updates: Annotated[
            int | None, typer.Option(metavar="N", help="Optimizer updates of each run, 6.")
        ] = None,
        seed: Annotated[
            int, typer.Option(metavar="N", help="Of the weights and the order of the examples.")
        ] = 0,
    ) -> None:
        """Train the same model on the same text in JAX and in PyTorch, and compare.

        Exit status 0: equal, 1: they differ, 2: bad input, 130: interrupted.
        """
        from jax_accum.crosscheck.errors import InputError

        try:
            if pair is not None:
                raise typer.Exit(_check_pair(pair, report))
            status = _crosscheck(
                text=text or [],
                jsonl=jsonl,
                field=field,
                names=case or [],
                full=full,
                accumulations=microbatches,
                listing=list_,
                plant=plant,
                folder=report,
                updates=updates,
                seed=seed,
            )
        except InputError as error:
            status = bad_input(error)
        raise typer.Exit(status)


def _crosscheck(
    *,
    text: list[Path],
    jsonl: Path | None,
    field: str | None,
    names: list[str],
    full: bool,
    accumulations: list[int] | None,
    listing: bool,
    plant: str | None,
    folder: Path,
    updates: int | None,
    seed: int,
) -> int:
    """Checks all input before anything slow is imported, then hands over to the terminal."""
    from jax_accum.crosscheck import cases, corpus, faults
    from jax_accum.crosscheck.errors import InputError
    from jax_accum.crosscheck.matrix import AnyCase, full_matrix, needs_devices

    quick = cases.make_matrix(accumulations or cases.ACCUMULATIONS)
    fault = None if plant is None else faults.find_fault(plant)
    # The PyTorch side's faults are planted in the cases of the full matrix alone.
    wanted = full or bool(names) or (fault is not None and fault.side == "PyTorch")
    every: list[AnyCase] = [*quick, *(full_matrix() if wanted else ())]
    chosen = cases.select(every, names)
    if fault is not None and not names:
        chosen = [case for case in chosen if fault.shows_in(case)]
        if not chosen:
            raise InputError(f"--plant {plant} cannot show in any case with these --microbatches")
    if listing:
        _need("rich", "--list")
        from jax_accum.crosscheck import terminal

        more = [case for case in full_matrix() if not names and case not in chosen]
        terminal.show_list(chosen, more, list(faults.ALL_FAULTS.values()))
        return FINE
    updates = cases.UPDATES if updates is None else updates
    if not 1 <= updates <= cases.MAX_UPDATES:
        raise InputError(f"--updates must be from 1 to {cases.MAX_UPDATES}, got {updates}")
    if not 0 <= seed < 2**63:
        raise InputError(f"--seed must be from 0 to 2^63 - 1, got {seed}")
    documents, source = corpus.choose(text, jsonl, field)
    _need_packages()
    from jax_accum.crosscheck import report, terminal

    if needs_devices(chosen):
        _need_devices()
    report.check_folder(folder)
    command = ["crosscheck"]
    command += [part for path in text for part in ("--text", str(path))]
    command += ["--jsonl", str(jsonl), "--field", str(field)] if jsonl is not None else []
    command += [part for name in names for part in ("--case", name)]
    command += ["--full"] if full else []
    command += [part for count in accumulations or [] for part in ("--microbatches", str(count))]
    command += ["--plant", plant] if plant is not None else []
    command += ["--updates", str(updates)] if updates != cases.UPDATES else []
    command += ["--seed", str(seed)] if seed else []
    return terminal.run(documents, source, chosen, updates, seed, fault, folder, command)


def _check_pair(target: str, folder: Path) -> int:
    """Checks a pair of somebody's own models."""
    _need_packages()
    from jax_accum.crosscheck import pair_report, report

    pair = pair_report.load(target)
    report.check_folder(folder)
    return pair_report.run(pair, folder, ["crosscheck", "--pair", target])


def _need_devices() -> None:
    """Two CPU devices: to be said before JAX is used for the first time."""
    import jax

    from jax_accum.crosscheck.matrix import REPLICAS

    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    # Where JAX runs already, a case that lacks devices says so itself.
    with contextlib.suppress(RuntimeError):
        if getattr(jax.config, "jax_num_cpu_devices", 0) < REPLICAS:
            jax.config.update("jax_num_cpu_devices", REPLICAS)


def _need_packages() -> None:
    for package, label in (
        ("torch", "PyTorch"),
        ("flax", "Flax"),
        ("rich", "rich"),
        ("matplotlib", "matplotlib"),
    ):
        _need(package, label)


def _need(package: str, label: str) -> None:
    from jax_accum.crosscheck.errors import InputError

    if importlib.util.find_spec(package) is None:
        raise InputError(f"{label} is not installed: {INSTALL}")
