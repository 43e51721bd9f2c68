"""The gradient of a group: many microbatches, one sum, one division.

The facts it stands for:

- `accumulate`: the divisor is the weight of the whole group, term by term. It is counted before the
  first forward pass or divided out at the end, and the two agree.
- `group_weights`: a denominator needs labels, not a model.
- `_forward_backward`: a microbatch with weight 0 adds nothing, whatever its gradient would have
  been, and its outputs are gone before the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from torch_ref._terms import as_coefficients, as_terms, as_weight, as_weights, example_count
from torch_ref.gradients import GradientSums, gradient_norm
from torch_ref.losses import Weighted
from torch_ref.unchanged import parameters_unchanged

LossFn = Callable[[Any, Any], Weighted | dict[str, Weighted]]
WeightsFn = Callable[[Any], Any]
RejectFn = Callable[[dict[str, Tensor]], bool]


@dataclass(frozen=True)
class Group:
    """What one group of microbatches came to; its gradient is in ``.grad`` of the parameters.

    Attributes:
      loss: sum over terms of coefficient * sum / weight, terms without weight left out.
      sums: by term, the group's summed loss.
      weights: by term, what its sum is divided by (an int for counts).
      grad_norm: L2 norm over all parameters, after the division and before any clipping.
      microbatches: microbatches of the group, those without weight and those rejected included.
      examples: examples in them.
      tokens: weight of the first term, rounded to a whole number.
      rejected: microbatches left out by ``reject``.
    """

    loss: float
    sums: dict[str, float]
    weights: dict[str, float]
    grad_norm: float
    microbatches: int
    examples: int
    tokens: int
    rejected: int = 0

    @property
    def empty(self) -> bool:
        """Whether nothing at all was supervised, so that no update is due."""
        return not any(self.weights.values())


def accumulate(
    model: nn.Module,
    loss_fn: LossFn,
    microbatches: Iterable[Any],
    *,
    coefficients: Mapping[str, float] | None = None,
    denominators: Literal["first", "last"] = "last",
    weights_fn: WeightsFn | None = None,
    reject: RejectFn | None = None,
) -> Group:
    """Leaves the gradient of a whole group in ``.grad``, and returns what the group came to.

    With terms t, microbatches a, sums S, weights W and coefficients c, the gradient is
    ``sum_t c_t * sum_a grad S_ta / sum_a W_ta``: that of the undivided batch.

    Args:
      model: its trainable parameters receive the gradient; what ``.grad`` held is dropped.
      loss_fn: ``loss_fn(model, microbatch)`` returns a `Weighted`, or a dict of them by term.
      microbatches: the group's; at least one. May be an iterator, read once, one at a time, when
        denominators come last.
      coefficients: by term, 1 where absent.
      denominators: "last" divides at the end, one gradient buffer per term. "first" counts all
        weights before the first forward pass and seeds each backward pass with ``c_t / W_t``: one
        buffer for all terms, and no large sum that could overflow a narrow type.
      weights_fn: for "first": ``weights_fn(microbatch)`` is the weight (or a dict by term) that
        ``loss_fn`` will report, from the batch alone.
      reject: for "last": sees the gradient of each microbatch's own loss, by parameter name; true
        leaves the microbatch out of sums and weights alike.

    Raises:
      ValueError: no microbatch, a weight that is negative, not finite or depends on parameters,
        terms that differ between microbatches, or options that do not go together.
      RuntimeError: a parameter changed before the group ended.

    >>> import torch
    >>> model = nn.Linear(1, 1, bias=False)
    >>> def loss_fn(model, x):
    ...     return Weighted(model(x).sum(), torch.tensor(x.numel()))
    >>> group = accumulate(model, loss_fn, [torch.ones(3, 1), torch.full((1, 1), 5.0)])
    >>> group.weights, model.weight.grad  # (1 + 1 + 1 + 5) / 4, where the mean of means is 3
    ({'loss': 4}, tensor([[2.]]))
    """
    if (denominators == "first") != (weights_fn is not None):
        raise ValueError(
            f"weights_fn goes with denominators='first', got denominators={denominators!r} and "
            f"weights_fn={weights_fn!r}: give both, or neither to divide at the end"
        )
    if reject is not None and denominators == "first":
        raise ValueError(
            "reject needs denominators='last': the weight of what was accepted is known at the end"
        )
    counted: dict[str, float] | None = None
    if weights_fn is not None:
        microbatches = list(microbatches)
        counted = group_weights(weights_fn, microbatches)

    sums = GradientSums(model)
    totals: dict[str, float] = {}
    weights: dict[str, float] = {}
    taken = examples = rejected = 0
    with parameters_unchanged(model) as check:
        for microbatch in microbatches:
            own = sums if reject is None else GradientSums(model)
            terms = _forward_backward(model, loss_fn, microbatch, own, counted, coefficients)
            taken += 1
            examples += example_count(microbatch)
            if taken > 1 and set(terms) != set(totals):
                raise ValueError(
                    f"loss_fn returned the terms {sorted(terms)} for microbatch {taken}, but "
                    f"{sorted(totals)} before: return every term, with weight 0 where it is absent"
                )
            accepted = True
            if reject is not None:
                factors = _factors({n: w for n, (_, w) in terms.items()}, coefficients)
                accepted = not reject({n: own.combined(n, factors) for n in own.parameters})
                if accepted:
                    sums.add(own)
            rejected += not accepted
            for name, (total, weight) in terms.items():
                totals[name] = totals.get(name, 0.0) + (total if accepted else 0.0)
                weights[name] = weights.get(name, 0) + (weight if accepted else 0)
            check(f"microbatch {taken}")
    if not taken:
        raise ValueError("microbatches is empty: a group has at least one microbatch")
    if counted is not None and counted != weights:
        raise ValueError(
            f"weights_fn counted {counted}, but loss_fn reported {weights}: they must agree"
        )

    factors = _factors(weights, coefficients)
    sums.write_gradients(dict.fromkeys(weights, 1.0) if counted is not None else factors)
    return Group(
        loss=sum(factors[name] * totals[name] for name in totals),
        sums=totals,
        weights=weights,
        grad_norm=gradient_norm(model),
        microbatches=taken,
        examples=examples,
        tokens=round(next(iter(weights.values()))),
        rejected=rejected,
    )


def group_weights(weights_fn: WeightsFn, microbatches: Iterable[Any]) -> dict[str, float]:
    """By term, the weight of a whole group, counted without running the model."""
    weights: dict[str, float] = {}
    for microbatch in microbatches:
        for name, weight in as_weights(weights_fn(microbatch)).items():
            weights[name] = weights.get(name, 0) + weight
    return weights


def _forward_backward(
    model: nn.Module,
    loss_fn: LossFn,
    microbatch: Any,
    sums: GradientSums,
    counted: Mapping[str, float] | None,
    coefficients: Mapping[str, float] | None,
) -> dict[str, tuple[float, float]]:
    """One forward and backward; every output dies with this frame, only plain numbers leave it."""
    terms = as_terms(loss_fn(model, microbatch))
    numbers = {}
    for name, term in terms.items():
        weight = as_weight(name, term.weight)
        # A term without weight is 0 by definition; its total may well be NaN.
        numbers[name] = (float(term.total.detach()) if weight else 0.0, weight)
    with_weight = [name for name, (_, weight) in numbers.items() if weight]
    if counted is None:
        for name in with_weight:
            sums.backward(name, terms[name].total, keep_graph=name != with_weight[-1])
    elif with_weight:
        factors = _factors(counted, coefficients)
        seeded = [factors.get(name, 0.0) * terms[name].total for name in with_weight]
        sums.backward(with_weight[0], sum(seeded[1:], start=seeded[0]))
    return numbers


def _factors(
    weights: Mapping[str, float], coefficients: Mapping[str, float] | None
) -> dict[str, float]:
    """``c_t / W_t`` by term, and 0 for a term that nothing in the group supervised."""
    by_term = as_coefficients(coefficients, list(weights))
    return {name: by_term[name] / weights[name] if weights[name] else 0.0 for name in weights}
