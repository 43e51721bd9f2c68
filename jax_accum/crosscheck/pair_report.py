"""`--pair MODULE:NAME`: finds somebody's pair, checks it, prints and writes what was found."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from jax_accum._by_name import find
from jax_accum._statuses import FINE, FOUND, INTERRUPTED
from jax_accum.crosscheck.compare import Finding, first_failure, worst
from jax_accum.crosscheck.errors import InputError
from jax_accum.crosscheck.pair_run import PairResult, check_pair
from jax_accum.crosscheck.pairs import Pair, PairCase, pair_cases
from jax_accum.crosscheck.report import JSON_NAME, replace_file
from jax_accum.crosscheck.summary import finding_data, plain, times, versions


def load(target: str) -> Pair:
    """The pair that ``MODULE:NAME`` names, or that the function of that name returns.

    Raises:
      InputError: there is none.
    """
    try:
        found = find(target, "--pair")
    except ValueError as error:
        raise InputError(str(error)) from error
    try:
        pair = found() if callable(found) and not isinstance(found, Pair) else found
    except (TypeError, ValueError) as error:
        raise InputError(f"--pair {target}: {error}") from error
    if not isinstance(pair, Pair):
        raise InputError(
            f"--pair {target} is a {type(pair).__name__}: give a jax_accum.crosscheck.Pair, or a "
            "function without arguments that returns one"
        )
    return pair


def run(pair: Pair, folder: Path, command: Sequence[str]) -> int:
    """Checks a pair, a line per case; writes ``report.json``, also if cut short.

    Returns:
      the exit status: 0 equal, 1 anything else, 130 interrupted.

    Raises:
      InputError: the map does not fit the two models, or a loss is none.
    """
    console = Console(highlight=False)
    cases = pair_cases(pair)
    found: dict[str, list[Finding]] = {}

    def done(case: PairCase, findings: list[Finding]) -> None:
        found[case.name] = findings
        verdict = "equal" if first_failure(findings) is None else "differ"
        ratio = times(worst(findings).ratio)
        line = f"[{len(found)}/{len(cases)}] {case.name}: {verdict}, {ratio} what rounding allows"
        console.print(escape(line), soft_wrap=True)

    status = None
    try:
        result = check_pair(pair, done)
    except KeyboardInterrupt:
        words = f"The run was cut short after {len(found)} of {len(cases)} cases."
        result, status = PairResult(pair, "cut short", words, found), INTERRUPTED
    except (TypeError, ValueError) as error:
        raise InputError(f"{pair.name}: {error}") from error
    data = _as_data(result, ["jax-accum", *command])
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    replace_file(folder / JSON_NAME, text.encode())
    color = {"equal": "green", "differ": "red"}.get(result.verdict, "yellow")
    console.print(f"[bold {color}]{escape(result.sentence)}[/bold {color}]", soft_wrap=True)
    console.print(f"Report: {escape(str(folder / JSON_NAME))}", soft_wrap=True)
    return status if status is not None else FINE if result.equal else FOUND


def _as_data(result: PairResult, command: Sequence[str]) -> Any:
    return plain(
        {
            "schema": 1,
            "pair": result.pair.name,
            "verdict": result.verdict,
            "sentence": result.sentence,
            "command": shlex.join(command),
            "versions": versions(),
            "cases": [
                {
                    "name": name,
                    "verdict": "equal" if first_failure(findings) is None else "differ",
                    "compared": len(findings),
                    "worst": finding_data(worst(findings)),
                    "parameters": [
                        finding_data(f)
                        for f in findings
                        if f.parameter and f.side == "JAX vs PyTorch"
                    ],
                }
                for name, findings in result.findings.items()
            ],
        }
    )
