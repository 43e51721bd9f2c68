"""The PyTorch side: the reference's own loop, and the undivided runs that it is judged by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from jax_accum.crosscheck import recipe
from jax_accum.crosscheck.data import Group, pad
from jax_accum.crosscheck.gpt import GPTSizes
from jax_accum.crosscheck.maps import Arrays, ParameterMap
from jax_accum.crosscheck.torch_runs import by_accumulation, by_gradient
from jax_accum.crosscheck.trace import COUNTERS, Trace, tree_norm
from torch_ref.losses import Weighted, next_token_cross_entropy, next_token_targets
from torch_ref.models import GPT, GPTConfig
from torch_ref.undivided import undivided

Batch = dict[str, torch.Tensor]
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch on one thread: this model is too small to share out.

    With more, its threads wait for each other by spinning, and on a machine whose cores are busy
    (JAX compiles beside it) that took a hundred times as long.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class TorchSide:
    """Trains the reference model from given weights, and tells what it saw under JAX paths.

    Args:
      sizes: of the model.
      mapping: between the parameters of the two models.
      weights: initial weights by JAX path, float64.

    Raises:
      ValueError: the map does not fit the model.
    """

    def __init__(self, sizes: GPTSizes, mapping: ParameterMap, weights: Arrays) -> None:
        self.config = GPTConfig(**vars(sizes))
        self.mapping = mapping
        self.weights = mapping.to_torch(weights)
        shapes = {name: tuple(p.shape) for name, p in GPT(self.config).named_parameters()}
        mapping.check({path: array.shape for path, array in weights.items()}, shapes)

    def accumulated(
        self,
        groups: Sequence[Group],
        optimizer: str,
        dtype: str,
        microbatch_size: int,
        denominators: str = "last",
    ) -> Trace:
        """A run of the reference's accumulation loop, one update per group.

        Args:
          groups: the examples of each update.
          optimizer: ``sgd`` or ``adamw``.
          dtype: of parameters and activations.
          microbatch_size: examples per microbatch; a short last one has fewer rows, no padding.
          denominators: ``first`` counts the group's tokens before its first forward pass, ``last``
            divides the finished sums.
        """
        model = self._model(dtype)
        order: dict[str, Any] = {}
        if denominators == "first":
            order = {"denominators": "first", "weights_fn": _weight}
        trace, counts = by_accumulation(
            model,
            _optimizer(model, optimizer),
            _loss,
            (_microbatches(group, microbatch_size) for group in groups),
            self.mapping.to_jax,
            **order,
        )
        totals = counts.as_dict()
        trace.counters = {name: totals[name] for name in COUNTERS}
        return trace

    def undivided(self, groups: Sequence[Group], optimizer: str, dtype: str) -> Trace:
        """The same updates from whole batches: nothing is cut, summed up or divided again."""

        def gradient(model: GPT, group: Group) -> tuple[float, Arrays]:
            found = undivided(model, _loss, _batch(group.examples), dtype=DTYPES[dtype])
            return found.loss, found.gradients

        return self._train(groups, optimizer, dtype, gradient)

    def pieces(
        self, groups: Sequence[Group], optimizer: str, dtype: str, microbatch_size: int
    ) -> Trace:
        """The same from microbatches, each by itself, added up in float64 and divided once."""

        def gradient(model: GPT, group: Group) -> tuple[float, Arrays]:
            parts = [
                undivided(model, _loss, microbatch, dtype=DTYPES[dtype])
                for microbatch in _microbatches(group, microbatch_size)
            ]
            weights = [part.weights["loss"] for part in parts]
            shares = [weight / sum(weights) for weight in weights]
            loss = sum(share * part.loss for share, part in zip(shares, parts, strict=True))
            total = {name: np.zeros(array.shape) for name, array in parts[0].gradients.items()}
            for share, part in zip(shares, parts, strict=True):
                for name, array in part.gradients.items():
                    total[name] += share * array.astype(np.float64)
            return loss, {name: array.astype(dtype) for name, array in total.items()}

        return self._train(groups, optimizer, dtype, gradient)

    def _train(
        self,
        groups: Sequence[Group],
        optimizer: str,
        dtype: str,
        gradient: Callable[[GPT, Group], tuple[float, Arrays]],
    ) -> Trace:
        """An update for each group; ``gradient(model, group)`` is its loss and gradient."""
        model, to_jax = self._model(dtype), self.mapping.to_jax
        made = _optimizer(model, optimizer)
        return by_gradient(model, made, groups, gradient, lambda _, found: tree_norm(found), to_jax)

    def _model(self, dtype: str) -> GPT:
        model = GPT(self.config, dtype=DTYPES[dtype])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(self.weights[name]))
        return model


def _optimizer(model: GPT, name: str) -> tuple[Any, Any, float | None]:
    """Optimizer, scheduler and clipping limit of a recipe."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=recipe.SGD_LEARNING_RATE), None, None
    adamw = torch.optim.AdamW(
        model.parameters(),
        lr=recipe.ADAMW_LEARNING_RATE,
        betas=recipe.ADAMW_BETAS,
        eps=recipe.ADAMW_EPS,
        weight_decay=recipe.WEIGHT_DECAY,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, recipe.warmup)
    return adamw, schedule, recipe.CLIP_NORM


def _batch(examples: Sequence[Any]) -> Batch:
    arrays = pad(examples, len(examples))
    return {
        "tokens": torch.from_numpy(arrays["tokens"]).long(),
        "mask": torch.from_numpy(arrays["mask"]),
    }


def _microbatches(group: Group, size: int) -> list[Batch]:
    return [_batch(group.examples[i : i + size]) for i in range(0, len(group.examples), size)]


def _loss(model: Any, batch: Batch) -> Weighted:
    return next_token_cross_entropy(model(batch["tokens"]), batch["tokens"], mask=batch["mask"])


def _weight(batch: Batch) -> torch.Tensor:
    return next_token_targets(batch["tokens"], mask=batch["mask"]).sum()
