"""Runs the Python blocks of a page in Markdown, in order, and compares what they print.

A block marked `python` is run; a block marked `text` right after it is what it prints. As a
program, `run_page.py PAGE...` does that for each page, and the exit status is 1 if one fails.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```[ ]*$", flags=re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """Code, the line that it begins in, and what it should print; `None` if that is not said."""

    code: str
    line: int
    output: str | None


def blocks(text: str) -> Iterator[Block]:
    """The Python blocks of a page."""
    fences = list(FENCE.finditer(text))
    for i, fence in enumerate(fences):
        if fence.group(1) != "python":
            continue
        output = None
        if i + 1 < len(fences):
            after = fences[i + 1]
            if after.group(1) == "text" and not text[fence.end() : after.start()].strip():
                output = after.group(2)
        yield Block(fence.group(2), text.count("\n", 0, fence.start()) + 2, output)


def run_text(text: str, name: str) -> int:
    """Runs the blocks of a page in one namespace; returns how many there were.

    Raises:
      AssertionError: a block printed something else than the page says.
    """
    names: dict[str, object] = {"__name__": "page"}
    found = list(blocks(text))
    for block in found:
        # As many empty lines before it as on the page: tracebacks then name the right line.
        code = compile("\n" * (block.line - 1) + block.code, name, "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        if block.output is not None and printed.getvalue() != block.output:
            raise AssertionError(
                f"{name}, line {block.line}: the page says\n{block.output}\n"
                f"and the code prints\n{printed.getvalue()}"
            )
    return len(found)


if __name__ == "__main__":
    for page in sys.argv[1:]:
        run_text(Path(page).read_text(encoding="utf-8"), page)
