"""Gradients as sums: added in at least float32, one buffer per parameter and loss term.

The facts it stands for:

- `GradientSums`: a group starts from nothing, and narrow types are summed in float32.
- `gradient_norm` and `clip_gradients`: the norm is of the whole tree, and clipping happens once,
  to the finished gradient of the group.
- `gradients`, `parameters`: arrays leave the framework as NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn


class GradientSums:
    """Sums of gradients of one group by loss term, beside the parameters they belong to.

    A buffer is at least float32 (float64 and complex stay what they are): 257 bfloat16 ones
    added in bfloat16 are 256. Each ``.grad`` is moved out leaf by leaf while the backward pass
    runs, so no second gradient tree is ever alive.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.by_term: dict[str, dict[str, Tensor]] = {}
        for parameter in self.parameters.values():
            parameter.grad = None

    def backward(self, term: str, total: Tensor, *, keep_graph: bool = False) -> None:
        """Adds the gradient of the scalar ``total`` to the sums of ``term``."""
        if not total.requires_grad:
            return  # a constant: nothing in it depends on a parameter
        sums = self.by_term.setdefault(term, {})

        def take(name: str) -> Callable[[Tensor], None]:
            def hook(parameter: Tensor) -> None:
                assert parameter.grad is not None
                if name in sums:
                    sums[name].add_(parameter.grad)
                else:
                    wide = torch.promote_types(parameter.dtype, torch.float32)
                    sums[name] = parameter.grad.to(wide)
                parameter.grad = None

            return hook

        hooks = [
            parameter.register_post_accumulate_grad_hook(take(name))
            for name, parameter in self.parameters.items()
        ]
        try:
            total.backward(retain_graph=keep_graph)
        finally:
            for hook in hooks:
                hook.remove()

    def add(self, other: GradientSums) -> None:
        """Adds the sums of ``other``, which are not to be used again."""
        for term, theirs in other.by_term.items():
            ours = self.by_term.setdefault(term, {})
            for name, value in theirs.items():
                ours[name] = ours[name].add_(value) if name in ours else value

    def combined(self, name: str, factors: Mapping[str, float]) -> Tensor:
        """Of one parameter, the sum over terms of factor * gradient; zeros if none reached it.

        Zeros and not ``None``: a parameter that these examples did not use has gradient 0, and
        weight decay and momentum act on it as on any other.
        """
        parameter = self.parameters[name]
        wide = torch.promote_types(parameter.dtype, torch.float32)
        total: Tensor | None = None
        for term, sums in self.by_term.items():
            if name in sums:
                part = sums[name] * factors[term]
                total = part if total is None else total.add_(part)
        return torch.zeros_like(parameter, dtype=wide) if total is None else total

    def write_gradients(self, factors: Mapping[str, float]) -> None:
        """Puts the combined gradient into ``.grad``, rounded once, and forgets the sums."""
        for name, parameter in self.parameters.items():
            parameter.grad = self.combined(name, factors).to(parameter.dtype)
            for sums in self.by_term.values():
                sums.pop(name, None)  # so that one leaf at a time exists twice, not the tree


def gradient_norm(model: nn.Module) -> float:
    """L2 norm over the gradients of all parameters, accumulated in float64."""
    total = 0.0
    for parameter in model.parameters():
        if parameter.grad is not None:
            wide = torch.promote_types(parameter.grad.dtype, torch.float64)
            total += float(torch.linalg.vector_norm(parameter.grad, dtype=wide)) ** 2
    return math.sqrt(total)


def clip_gradients(model: nn.Module, limit: float, norm: float) -> None:
    """Scales every gradient by ``min(1, limit / norm)``, ``norm`` being that of the whole tree.

    `torch.nn.utils.clip_grad_norm_` divides by ``norm + 1e-6``; the definition does not
    (Pascanu et al., 2013, algorithm 1), and float64 shows the difference.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> model.weight.grad = torch.tensor([[3.0, 4.0]])
    >>> clip_gradients(model, 1.0, gradient_norm(model))
    >>> model.weight.grad
    tensor([[0.6000, 0.8000]])
    """
    if norm > limit:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(limit / norm)


def first_nonfinite(model: nn.Module) -> str | None:
    """The name of the first parameter whose gradient holds an inf or a NaN, if any."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            return name
    return None


def gradients(model: nn.Module) -> dict[str, np.ndarray]:
    """The gradient by parameter name, copied to NumPy; bfloat16, which NumPy lacks, as float32."""
    return {
        name: as_numpy(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def parameters(model: nn.Module) -> dict[str, np.ndarray]:
    """The parameters by name, copied to NumPy; bfloat16, which NumPy lacks, as float32."""
    return {name: as_numpy(parameter) for name, parameter in model.named_parameters()}


def as_numpy(tensor: Tensor) -> np.ndarray:
    """A NumPy copy that later updates do not change; bfloat16 widens to float32 exactly."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.cpu().numpy().copy()
