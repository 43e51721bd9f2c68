"""Pair: somebody's own model in both frameworks, to be held against each other.

A pair is checked in this order: the parameter map fits, the two models are the same function, and
then that accumulation changes neither of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_accum.crosscheck.rules import Rule, named_arrays

if TYPE_CHECKING:
    from torch import nn

Tree = Any
OPTIMIZERS = ("sgd", "adamw", "adafactor")
DTYPES = ("float32", "float64")
WAYS = ("across", "inone")


@dataclass(frozen=True)
class Pair:
    """A JAX loss and a PyTorch module with its loss, from the same weights, on the same batches.

    Args:
      jax_loss: ``jax_loss(params, batch)`` returns a `jax_accum.Weighted`, or a dict of them by
        term name: a sum and what it is divided by, never a mean.
      torch_module: makes the module, in the mode (train or eval) that it is to be compared in.
      torch_loss: ``torch_loss(module, batch)`` returns ``(sum, weight)``, or a dict by term name.
      weights: the JAX parameters, any tree of floating arrays. The module's are overwritten with
        them.
      rules: which parameter is which: `jax_accum.crosscheck.Rule`, and the helpers in
        `jax_accum.crosscheck.layer_maps`.
      batches: one for each update: dicts of NumPy arrays whose first axis counts the examples.
        Floating arrays take the dtype of the run; integers come to PyTorch as int64.
      microbatches: numbers A that a batch is cut into; each divides the examples of every batch.
      optimizers: of ``sgd`` (with momentum), ``adamw`` (with clipping and warm-up), ``adafactor``.
      dtypes: of ``float32``, ``float64``.
      ways: of ``across`` (`MultiSteps`; losses of one term) and ``inone`` (`make_train_step`).
      coefficients: by term, 1 where absent.
      name: in the report.

    Raises:
      ValueError: no batch, examples that A does not divide, or an unknown name.
      TypeError: a batch that is no dict of arrays.

    Example:
      >>> import jax.numpy as jnp, torch
      >>> import jax_accum as ja
      >>> from jax_accum.crosscheck import Pair, check_pair
      >>> from jax_accum.crosscheck.layer_maps import dense
      >>> def jax_loss(params, batch):
      ...     error = batch["x"] @ params["kernel"] + params["bias"] - batch["y"]
      ...     return ja.Weighted(jnp.sum(error**2), error.shape[0])
      >>> def torch_loss(module, batch):
      ...     return ((module(batch["x"]) - batch["y"]) ** 2).sum(), len(batch["x"])
      >>> batch = {"x": np.arange(8.0).reshape(4, 2) / 8, "y": np.ones((4, 1))}
      >>> pair = Pair(
      ...     jax_loss=jax_loss,
      ...     torch_module=lambda: torch.nn.Linear(2, 1),
      ...     torch_loss=torch_loss,
      ...     weights={"kernel": np.array([[0.5], [0.25]]), "bias": np.zeros(1)},
      ...     rules=dense("", ""),
      ...     batches=[batch, batch],
      ...     microbatches=(2,),
      ...     optimizers=("sgd",),
      ...     dtypes=("float64",),
      ...     ways=("inone",),
      ... )
      >>> check_pair(pair).verdict
      'equal'
    """

    jax_loss: Callable[[Tree, Any], Any]
    torch_module: Callable[[], nn.Module]
    torch_loss: Callable[[Any, Any], Any]
    weights: Tree
    rules: Sequence[Rule]
    batches: Sequence[Mapping[str, Any]]
    microbatches: Sequence[int] = (2, 4)
    optimizers: Sequence[str] = ("sgd", "adamw")
    dtypes: Sequence[str] = DTYPES
    ways: Sequence[str] = WAYS
    coefficients: Mapping[str, float] | None = None
    name: str = "pair"

    def __post_init__(self) -> None:
        if not len(self.batches):
            raise ValueError("batches is empty: give one batch for each update to compare")
        for field, known in (("optimizers", OPTIMIZERS), ("dtypes", DTYPES), ("ways", WAYS)):
            given = getattr(self, field)
            unknown = [name for name in given if name not in known]
            if unknown or len(given) == 0:
                raise ValueError(f"{field} must be some of {known}, got {given!r}")
        if not self.microbatches:
            raise ValueError("microbatches is empty: give a number, such as (4,)")
        for number, batch in enumerate(self.batches):
            rows = examples_in(batch, number)
            for count in self.microbatches:
                if count < 1 or rows % count:
                    raise ValueError(
                        f"microbatches holds {count}, which does not divide the {rows} examples of "
                        f"batch {number}: choose divisors, or cut the batch"
                    )
        arrays = named_arrays(self.weights)
        for path, array in arrays.items():
            if not np.issubdtype(array.dtype, np.floating):
                raise ValueError(
                    f"weights holds {path!r} of dtype {array.dtype}: keep what is not trained out "
                    "of it, for instance in the loss function"
                )
        if not arrays:
            raise ValueError("weights holds no arrays: give the parameters of the JAX model")


@dataclass(frozen=True)
class PairCase:
    """One comparison of a pair.

    >>> PairCase("inone", 4, "sgd", "float32").name
    'sgd-float32-a4-inone'
    """

    way: str
    microbatches: int
    optimizer: str
    dtype: str

    @property
    def name(self) -> str:
        """What the report shows."""
        return f"{self.optimizer}-{self.dtype}-a{self.microbatches}-{self.way}"


def pair_cases(pair: Pair) -> list[PairCase]:
    """Every product of a pair's choices."""
    return [
        PairCase(way, count, optimizer, dtype)
        for count in pair.microbatches
        for optimizer in pair.optimizers
        for dtype in pair.dtypes
        for way in pair.ways
    ]


def examples_in(batch: Any, number: int) -> int:
    """The examples of a batch.

    Raises:
      TypeError: it is no dict of arrays.
      ValueError: its arrays differ in length.
    """
    if not isinstance(batch, Mapping) or not batch:
        raise TypeError(
            f"batch {number} must be a dict of arrays, got {type(batch).__name__}: name its parts"
        )
    lengths = {name: np.shape(array)[:1] for name, array in batch.items()}
    if len(set(lengths.values())) != 1 or () in lengths.values():
        raise ValueError(
            f"batch {number} has arrays of different length, {lengths}: the first axis of each "
            "counts the examples"
        )
    return next(iter(lengths.values()))[0]
