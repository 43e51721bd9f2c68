"""The one error that the command answers with a single line: something the user gave is wrong."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input from outside: a file, a name, a number. The command exits with status 2.

    The message is one line that names what was given, what is wrong with it and what to do.

    >>> str(InputError("--updates must be at least 1, got 0"))
    '--updates must be at least 1, got 0'
    """
