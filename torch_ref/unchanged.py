"""A check that no parameter changes inside a group.

The fact it stands for: all microbatches of a group must see the same parameters, or their sum is
the gradient of nothing. That is looked at, not assumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def parameters_unchanged(model: nn.Module) -> Iterator[Callable[[str], None]]:
    """Raises RuntimeError if a parameter changes inside the block, and says which and when.

    Version counters are looked at whenever the yielded function is called; they name the moment.
    A digest of every parameter's bytes at both ends finds what counters cannot see (``.data``).

    >>> model = nn.Linear(1, 1)
    >>> with parameters_unchanged(model):
    ...     model.weight.data += 1
    Traceback (most recent call last):
    RuntimeError: parameter 'weight' changed before the end of the group: update once, at the end
    """
    versions = {name: p._version for name, p in model.named_parameters()}
    digests = {name: _digest(p) for name, p in model.named_parameters()}

    def check(moment: str) -> None:
        for name, parameter in model.named_parameters():
            if parameter._version != versions[name]:
                raise RuntimeError(
                    f"parameter {name!r} changed during {moment} of a group: update once, at the "
                    "end"
                )

    yield check
    for name, parameter in model.named_parameters():
        if _digest(parameter) != digests[name]:
            raise RuntimeError(
                f"parameter {name!r} changed before the end of the group: update once, at the end"
            )


def _digest(parameter: Tensor) -> bytes:
    raw = parameter.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(raw.tobytes(), digest_size=16).digest()
