"""What every command answers: its exit status, and one line on standard error for bad input."""

from __future__ import annotations

import sys

# FOUND is what the command is there to find: a difference, a fault, a step that does not fit.
FINE, FOUND, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
INSTALL = "pip install 'jax-accum[crosscheck]'"


def bad_input(error: object) -> int:
    """Says in one line on standard error what was wrong; returns the exit status of bad input."""
    sys.stderr.write(f"jax-accum: {' '.join(str(error).split())}\n")
    return BAD_INPUT
