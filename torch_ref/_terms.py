"""What a loss function and a batch may look like, read the same way everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from torch_ref.losses import Weighted

SINGLE_TERM = "loss"


def as_terms(value: Any) -> dict[str, Weighted]:
    """Terms by name of a loss function's result; a single `Weighted` is the term ``"loss"``."""
    if isinstance(value, Weighted):
        value = {SINGLE_TERM: value}
    if not isinstance(value, Mapping) or not value:
        raise TypeError(
            f"loss_fn must return a Weighted or a dict of them by term name, got "
            f"{type(value).__name__}: return a sum and its weight, not a mean"
        )
    for name, term in value.items():
        if not isinstance(term, Weighted):
            raise TypeError(
                f"loss_fn must return Weighted terms, got {type(term).__name__} for {name!r}: "
                "return a sum and its weight, not a mean"
            )
        if term.total.ndim:
            raise ValueError(
                f"loss_fn returned a total of shape {tuple(term.total.shape)} for {name!r}: "
                "sum it to a scalar"
            )
        if getattr(term.weight, "requires_grad", False):
            raise ValueError(
                f"loss_fn returned a weight for {name!r} that depends on parameters: a denominator "
                "must be counted from the batch alone (detach it if that is meant)"
            )
    return dict(value)


def as_weights(value: Any) -> dict[str, float]:
    """Weights by term name of a weights function's result, as Python numbers."""
    weights = value if isinstance(value, Mapping) else {SINGLE_TERM: value}
    return {name: as_weight(name, weight) for name, weight in weights.items()}


def as_weight(name: str, weight: Any) -> float:
    """One weight as a Python number: an int stays an int, so that counts stay exact."""
    number = weight.item() if isinstance(weight, Tensor) else weight
    if not 0 <= number < float("inf"):
        raise ValueError(
            f"weight of term {name!r} must be finite and at least 0, got {number}: it counts what "
            "was supervised"
        )
    return number


def as_coefficients(coefficients: Mapping[str, float] | None, names: list[str]) -> dict[str, float]:
    """The coefficient of every term, 1 where none was given."""
    given = dict(coefficients or {})
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ValueError(
            f"coefficients names {unknown}, but the loss has the terms {names}: "
            "give coefficients to those"
        )
    return {name: float(given.get(name, 1.0)) for name in names}


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Every tensor of a batch: a tensor, or dicts, tuples and lists of them."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from tensors_of(value)


def example_count(batch: Any) -> int:
    """Examples of a microbatch: the length of its first tensor.

    >>> import torch
    >>> example_count({"tokens": torch.zeros(3, 9), "mask": torch.zeros(3, 9)})
    3
    """
    for tensor in tensors_of(batch):
        if tensor.ndim:
            return tensor.shape[0]
    raise TypeError(
        f"microbatches must hold a tensor whose first axis counts examples, got "
        f"{type(batch).__name__}: pass tensors, or dicts, tuples or lists of them"
    )
