"""A pair's runs in PyTorch: whole batches, microbatches put together exactly, and the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from jax_accum.crosscheck import pair_ways
from jax_accum.crosscheck.full_torch import make_optimizer
from jax_accum.crosscheck.maps import Arrays
from jax_accum.crosscheck.pairs import Pair, PairCase
from jax_accum.crosscheck.rules import RuleMap
from jax_accum.crosscheck.torch_runs import by_accumulation, by_gradient
from jax_accum.crosscheck.trace import Trace
from torch_ref.gradients import as_numpy, gradient_norm
from torch_ref.losses import Weighted
from torch_ref.undivided import undivided


class TorchRuns:
    """The PyTorch side of a pair; its traces are under the JAX paths.

    Args:
      pair: the pair.
      mapping: its rules, applied to the two models.
      weights: initial, float64 by PyTorch name.
    """

    def __init__(self, pair: Pair, mapping: RuleMap, weights: Arrays) -> None:
        self.pair = pair
        self.map = mapping
        self.weights = weights
        self.coefficients = dict(pair.coefficients or {})

    def module(self, dtype: str) -> nn.Module:
        """The module with the initial weights."""
        module = self.pair.torch_module().to(getattr(torch, dtype))
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in self.weights:
                    parameter.copy_(torch.from_numpy(self.weights[name]))
        return module

    def loss(self, module: Any, batch: Any) -> dict[str, Weighted]:
        """The pair's loss as terms."""
        terms = self.pair.torch_loss(module, batch)
        terms = terms if isinstance(terms, Mapping) else {"loss": terms}
        return {n: Weighted(total, torch.as_tensor(weight)) for n, (total, weight) in terms.items()}

    def undivided(self, optimizer: str, dtype: str) -> Trace:
        """Whole batches."""

        def gradient(module: nn.Module, batch: Any) -> tuple[float, Arrays]:
            found = undivided(module, self.loss, batch, coefficients=self.coefficients, dtype=None)
            return found.loss, found.gradients

        return self._train(optimizer, dtype, gradient)

    def pieces(self, optimizer: str, microbatches: int, dtype: str) -> Trace:
        """Microbatches: each gradient by one backward pass, added up in float64."""

        def gradient(module: nn.Module, batch: Any) -> tuple[float, Arrays]:
            parts = [self.loss(module, part) for part in pair_ways.cut(batch, microbatches)]
            whole = {name: sum(float(terms[name].weight) for terms in parts) for name in parts[0]}
            by_name = {n: p for n, p in module.named_parameters() if p.requires_grad}
            loss, total = 0.0, {name: np.zeros(p.shape) for name, p in by_name.items()}
            for terms in parts:
                with_weight = [name for name, term in terms.items() if term.weight]
                value = sum(
                    self.coefficients.get(name, 1.0) / whole[name] * terms[name].total
                    for name in with_weight
                )
                if not isinstance(value, torch.Tensor) or not value.requires_grad:
                    continue
                loss += value.item()
                found = torch.autograd.grad(value, list(by_name.values()), materialize_grads=True)
                for name, own in zip(by_name, found, strict=True):
                    total[name] += as_numpy(own)
            return loss, {name: array.astype(dtype) for name, array in total.items()}

        return self._train(optimizer, dtype, gradient)

    def accumulated(self, case: PairCase) -> Trace:
        """The reference's accumulation loop."""
        module = self.module(case.dtype)
        tensors = (pair_ways.tensors_of(batch, case.dtype) for batch in self.pair.batches)
        trace, counts = by_accumulation(
            module,
            make_optimizer(module, case.optimizer),
            self.loss,
            (pair_ways.cut(batch, case.microbatches) for batch in tensors),
            self.map.to_jax,
            coefficients=self.coefficients,
        )
        trace.counters = counts.as_dict()
        return trace

    def _train(
        self,
        name: str,
        dtype: str,
        gradient: Callable[[nn.Module, Any], tuple[float, Arrays]],
    ) -> Trace:
        """An update for each batch; ``gradient(module, batch)`` is its loss and gradient."""
        module = self.module(dtype)
        batches = (pair_ways.tensors_of(batch, dtype) for batch in self.pair.batches)
        made = make_optimizer(module, name)
        norm: Callable[..., float] = lambda module, _: gradient_norm(module)  # noqa: E731
        return by_gradient(module, made, batches, gradient, norm, self.map.to_jax)
