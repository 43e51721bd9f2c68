"""What a person sees in the terminal: progress, a table, one closing sentence."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jax_accum._statuses import FINE, FOUND, INTERRUPTED
from jax_accum.crosscheck.data import Document
from jax_accum.crosscheck.faults import Fault
from jax_accum.crosscheck.matrix import AnyCase

if TYPE_CHECKING:
    from jax_accum.crosscheck.run import CaseResult
    from jax_accum.crosscheck.summary import Told


def show_list(cases: Sequence[AnyCase], more: Sequence[AnyCase], faults: Sequence[Fault]) -> None:
    """Prints the cases, those that only ``--full`` runs, and the faults, by name."""
    console = _console()
    for title, rows in (
        ("Cases (--case NAME)", [(case.name, case.meaning) for case in cases]),
        ("More cases (--full, or --case NAME)", [(case.name, case.meaning) for case in more]),
        ("Faults (--plant NAME)", [(fault.name, fault.meaning) for fault in faults]),
    ):
        table = Table(title=title, title_justify="left", box=None, show_header=False)
        table.add_column(no_wrap=True, style="bold")
        table.add_column()
        for name, meaning in rows:
            table.add_row(name, meaning)
        console.print(table)


def run(
    documents: Sequence[Document],
    source: str,
    cases: Sequence[AnyCase],
    updates: int,
    seed: int,
    fault: Fault | None,
    folder: Path,
    command: Sequence[str],
) -> int:
    """Compares the cases with a progress bar, then prints and writes what was found.

    An interrupt ends the run early; what was found so far is written.

    Returns:
      the exit status: 0 equal, 1 differ, 130 interrupted.
    """
    from jax_accum.crosscheck import report
    from jax_accum.crosscheck.run import Crosscheck
    from jax_accum.crosscheck.summary import Told

    crosscheck = Crosscheck(documents, updates, seed, fault)
    interrupted = False
    errors = Console(stderr=True, highlight=False)
    ended = 0
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
    ) as progress:
        task = progress.add_task("compiling", total=len(cases))

        def done(result: CaseResult) -> None:
            nonlocal ended
            ended += 1
            progress.update(task, description=result.case.name, advance=1)
            if not errors.is_terminal:  # a bar that moves is nothing for a log
                verdict = "equal" if result.equal else "differ"
                line = f"[{ended}/{len(cases)}] {result.case.name}: {verdict}"
                errors.print(escape(line), soft_wrap=True)

        try:
            crosscheck.compare_all(cases, done)
        except KeyboardInterrupt:
            interrupted = True
    line = shlex.join(["jax-accum", *command])
    told = Told(crosscheck, len(cases), line, source, interrupted)
    show(told)
    page = report.write(folder, told)
    _console().print(f"Report: {escape(str(page))}", soft_wrap=True)
    if interrupted:
        return INTERRUPTED
    return FINE if told.verdict == "equal" else FOUND


def show(told: Told) -> None:
    """Prints the table of cases and the closing sentence."""
    from rich.box import SIMPLE_HEAD

    from jax_accum.crosscheck.summary import times

    console = _console()
    if told.results:
        console.print(
            "Each row trained one small model twice on the same text, in JAX and in PyTorch, and "
            "compared losses, gradients, weights and counters. [bold]Worst[/bold] is the largest "
            "difference divided by what rounding allows: up to 1 is rounding, more is a mistake."
        )
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("Case", no_wrap=True)
    table.add_column("Values", justify="right")
    table.add_column("Worst", justify="right")
    table.add_column("In")
    table.add_column("Verdict")
    for result in told.results:
        worst = result.worst
        place = (
            f"{worst.quantity} ({worst.side})"
            if result.failure is None
            else (f"first {result.failure.place}")
        )
        table.add_row(
            result.case.name,
            f"{len(result.findings):,}",
            times(result.worst.ratio).removesuffix(" times"),
            escape(place),
            "[green]equal[/green]" if result.equal else "[red]differ[/red]",
        )
    if told.results:
        console.print(table)
    for note in told.notes:
        console.print(f"Note: {escape(note)}")
    color = {"equal": "green", "differ": "red"}.get(told.verdict, "yellow")
    console.print(f"[bold {color}]{escape(told.sentence)}[/bold {color}]")


def _console() -> Console:
    # Numbers and paths are not to be coloured on their own account.
    return Console(highlight=False)
