"""``python -m jax_accum``: the same as the ``jax-accum`` command."""

from __future__ import annotations

import sys

from jax_accum.cli import main

if __name__ == "__main__":
    sys.exit(main())
