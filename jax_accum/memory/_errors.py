"""What running out of memory looks like, and what is raised when nothing is left to try."""

from __future__ import annotations

import jax


class DoesNotFitError(ValueError):
    """No microbatch size fits; the message says what takes the memory and what would help."""


def is_exhausted(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a device or in this process.

    Example:
      >>> is_exhausted(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"))
      True
      >>> is_exhausted(jax.errors.JaxRuntimeError("INVALID_ARGUMENT: no such axis"))
      False
    """
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
