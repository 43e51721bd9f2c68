"""Merge what pip resolved for two Python versions into constraints.txt.

Usage: `python scripts/merge_pins.py FREEZE_311 FREEZE_313 > constraints.txt`, where each
argument is the output of `pip freeze --exclude-editable` in an environment of that version.
A release that differs between the two gets a marker; torch is pinned for Python 3.11 alone.
"""

import re
import sys
from pathlib import Path

HEADER = """\
# Every package of the environments that make builds, with one tested release each.
# Python 3.11 has everything, PyTorch included, and the oldest JAX that is supported;
# 3.12 and newer have the newest JAX. CONTRIBUTING.md says how this file is renewed.
"""


def read(path: str) -> dict[str, str]:
    """Return the release of each package, by its normalised name."""
    pins = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        name, equals, release = line.strip().partition("==")
        if equals:
            # A local label such as +cpu names one build; other machines have another.
            pins[re.sub(r"[-_.]+", "-", name).lower()] = release.partition("+")[0]
    return pins


def merge(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """Return the constraint lines for Python 3.11 (`old`) and for 3.12 and newer (`new`)."""
    lines = []
    for name in sorted(old | new):
        if name == "torch":
            lines.append(f'torch=={old[name]}; python_version == "3.11"')
        elif name not in new or name not in old or old[name] == new[name]:
            lines.append(f"{name}=={old.get(name) or new[name]}")
        else:
            lines.append(f'{name}=={old[name]}; python_version < "3.12"')
            lines.append(f'{name}=={new[name]}; python_version >= "3.12"')
    return lines


if __name__ == "__main__":
    print(HEADER + "\n".join(merge(read(sys.argv[1]), read(sys.argv[2]))))
