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
from jax_accum.crosscheck.trace import Trace
from torch_ref.accumulate import accumulate
from torch_ref.gradients import as_numpy, clip_gradients, gradient_norm, gradients, parameters
from torch_ref.losses import Weighted
from torch_ref.train import Counts, update
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
        module, trace, counts = self.module(case.dtype), Trace(), Counts()
        optimizer, scheduler, clip_norm = make_optimizer(module, case.optimizer)
        options = {"coefficients": self.coefficients}
        for batch in self.pair.batches:
            cut = pair_ways.cut(pair_ways.tensors_of(batch, case.dtype), case.microbatches)
            first: Arrays = {}
            if not trace.losses:
                accumulate(module, self.loss, cut, **options)  # type: ignore[arg-type]
                first = self.map.to_jax(gradients(module))
            attempt = update(
                module,
                optimizer,
                self.loss,
                cut,
                scheduler=scheduler,
                clip_norm=clip_norm,
                counts=counts,
                **options,  # type: ignore[arg-type]
            )
            after = self.map.to_jax(parameters(module))
            trace.add(attempt.group.loss, attempt.group.grad_norm, first, after)
        trace.counters = counts.as_dict()
        return trace

    def _train(
        self,
        name: str,
        dtype: str,
        gradient: Callable[[nn.Module, Any], tuple[float, Arrays]],
    ) -> Trace:
        """An update for each batch; ``gradient(module, batch)`` is its loss and gradient."""
        module, trace = self.module(dtype), Trace()
        optimizer, scheduler, clip_norm = make_optimizer(module, name)
        for batch in self.pair.batches:
            loss, found = gradient(module, pair_ways.tensors_of(batch, dtype))
            for path, parameter in module.named_parameters():
                if path in found:
                    parameter.grad = torch.from_numpy(found[path])
            norm, first = gradient_norm(module), self.map.to_jax(gradients(module))
            if clip_norm is not None:
                clip_gradients(module, clip_norm, norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            trace.add(loss, norm, first, self.map.to_jax(parameters(module)))
        return trace
