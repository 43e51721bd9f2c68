"""The ``jax-accum plan`` command: a table, a picture, and the plan as a snippet to paste."""

# No postponed annotations here: typer reads them. What needs JAX is imported where it is used.
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jax_accum._by_name import find_function
from jax_accum._statuses import FOUND, INSTALL, bad_input

if TYPE_CHECKING:
    from jax_accum import BatchPlan
    from jax_accum.memory import Row, Search

EXAMPLE = "jax-accum plan --preset gpt-tiny --budget 64MiB --examples 16"
DEFAULT = "gpt-small"


def plan(
    preset: Annotated[
        str, typer.Option(metavar="NAME", help="gpt-tiny, gpt-small or gpt-medium.")
    ] = DEFAULT,
    make: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Your own: a function from a plan to (jitted step, tuple of its arguments).",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of a device: 16GiB, 80%, or bytes."),
    ] = None,
    examples: Annotated[
        int, typer.Option(metavar="N", help="Examples per update, of all replicas.")
    ] = 32,
    replicas: Annotated[int, typer.Option(metavar="D", help="Data replicas.")] = 1,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw peak against m, as PNG.")
    ] = None,
    cache: Annotated[bool, typer.Option(help="Keep what was compiled, for the next time.")] = True,
) -> None:
    """Find the largest microbatch whose training step fits a budget, without running it.

    Exit status 0: a plan was found, 1: nothing fits, 2: bad input.
    """
    from jax_accum import BatchPlan
    from jax_accum.memory import DoesNotFitError, as_bytes, largest_microbatch, readable

    try:
        start = BatchPlan.from_global_batch(examples, microbatch_size=1, replicas=replicas)
        limit = as_bytes(budget)
        maker = find_function(make, "--make") if make is not None else _preset(preset, start)
        title = make if make is not None else f"{preset}, {examples} examples per update"
        if plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise ValueError(f"--plot needs matplotlib: {INSTALL}")
        if plot is not None and (not plot.parent.is_dir() or plot.is_dir()):
            raise ValueError(f"--plot: {plot} cannot be written: no such folder, or a folder.")
    except ValueError as error:
        raise typer.Exit(bad_input(error)) from None
    _say(f"{title}: looking for the largest microbatch within {readable(limit)}")
    try:
        found = largest_microbatch(
            maker, start, limit, cache=_cache_folder() if cache else None, progress=_progress
        )
    except DoesNotFitError as error:
        _say(f"\nNothing fits: {error}", to_errors=True)
        raise typer.Exit(FOUND) from None
    _report(found)
    if plot is not None:
        from jax_accum.memory import _plot

        _plot.save(found, plot, title)
        _say(f"\nPicture: {plot}")


def _progress(row: "Row") -> None:
    from jax_accum.memory import readable

    peak = "memory ran out while compiling" if row.peak is None else readable(row.peak)
    _say(f"  m = {row.plan.microbatch_size}: {peak} ({row.how})")


def _report(found: "Search") -> None:
    import jax

    _say("\n" + found.table())
    if any(row.how == "predicted" for row in found.rows):
        _say("  ~ predicted by a line through the compiled ones")
    assert found.chosen.analysis is not None
    _say("\nWhat the chosen step needs: " + found.chosen.analysis.report())
    for note in found.notes:
        _say(f"  note: {note}")
    platform = jax.default_backend()
    if platform == "cpu":
        _say(
            "\nCompiled for this CPU. A GPU's compiler fuses and lays out differently: take the "
            "numbers for a first guess there, and run this once on the GPU itself."
        )
    _say("\nTo paste:\n\n" + snippet(found.plan))


def snippet(plan: "BatchPlan") -> str:
    """A plan as code."""
    mesh = ", mesh=mesh" if plan.replicas > 1 else ""
    return (
        "import jax_accum as ja\n\n"
        "# loss_fn(params, batch) returns a ja.Weighted; tx is an Optax optimizer: yours.\n"
        f"plan = ja.BatchPlan(microbatch_size={plan.microbatch_size}, "
        f"microbatches={plan.microbatches}, replicas={plan.replicas})\n"
        f"step = ja.make_train_step(loss_fn, tx, plan.microbatches{mesh})"
        f"  # {plan.examples_per_update} examples per update"
    )


def _preset(name: str, plan: "BatchPlan") -> Callable[["BatchPlan"], Any]:
    if importlib.util.find_spec("flax") is None:
        raise ValueError(f"the presets need Flax: {INSTALL}")
    from jax_accum.memory import _presets

    if name not in _presets.PRESETS:
        raise ValueError(f"--preset must be one of {', '.join(_presets.PRESETS)}, got {name!r}")
    # One device is compiled for, with the examples of one replica.
    return _presets.preset(_presets.PRESETS[name], plan.examples_per_replica)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jax-accum" / "memory"


def _say(text: str, *, to_errors: bool = False) -> None:
    typer.echo(text, err=to_errors)
