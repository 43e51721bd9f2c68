"""Oracle: sums, weights and gradients of a microbatch, in float64, and how noisy the step may be.

Everything is flat here: a gradient is one float64 vector over all parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_accum._weighted import Weighted
from jax_accum.doctor._case import Case, parts, stack, with_labels
from jax_accum.doctor._vectors import flat, norm

Tree = Any
MOST_BYTES = 2**28
"""Of gradients that are remembered, about."""


class Term(NamedTuple):
    """One term of one replica's part of a microbatch.

    Attributes:
      total: the sum.
      weight: what it is divided by.
      gradient: of the sum, flat, not divided.
      finite: whether all of the gradient is.
    """

    total: float
    weight: float
    gradient: np.ndarray
    finite: bool


Part = dict[str, Term]


class Oracle:
    """Per-term sums and gradients at any parameters, remembered.

    Args:
      case: whose loss it differentiates.
    """

    def __init__(self, case: Case):
        self.case = case
        self.params = flat(case.params)
        self._kept: dict[Any, Part] = {}
        self._whole: dict[Any, tuple[np.ndarray, Tree, list[Part]]] = {}  # by identity
        self._names: dict[int, tuple[np.ndarray, int]] = {}  # of parameters, by identity
        leaves, self._structure = jax.tree.flatten(case.params)
        self._shapes = [np.shape(x) for x in leaves]

    def weights(self, rows: Tree) -> dict[str, float]:
        """Weights by term, without a gradient: XLA drops the model."""
        if self.case.sums is not None:
            return {name: term.weight for name, term in self.part(self.params, rows).items()}
        with jax.enable_x64(True):
            found = compiled_weights(self.case.loss_fn)(self.unflat(self.params), _wide(rows))
            return {name: float(weight) for name, weight in found.items()}

    def terms(self) -> list[str]:
        """The names of the loss's terms."""
        return list(self.weights(stack(self.case.examples[:1])))

    def unflat(self, vector: np.ndarray) -> Tree:
        """A flat vector as a tree like the parameters, in float64."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self._shapes])
        pieces = np.split(vector, ends[:-1])
        return jax.tree.unflatten(
            self._structure, [p.reshape(s) for p, s in zip(pieces, self._shapes, strict=True)]
        )

    def microbatch(self, params: np.ndarray, batch: Tree, variant: str) -> list[Part]:
        """The parts of all replicas."""
        key = (id(params), id(batch), variant)
        known = self._whole.get(key)
        if known is None or known[0] is not params or known[1] is not batch:
            if len(self._whole) * params.nbytes > MOST_BYTES:
                self._whole.clear()
            found = [self.part(params, rows, variant) for rows in parts(batch, self.case.replicas)]
            known = self._whole[key] = (params, batch, found)
        return known[2]

    def part(self, params: np.ndarray, rows: Tree, variant: str = "as given") -> Part:
        """One replica's terms.

        Variants: "counted": the sums are right, but ignored entries count in the weight;
        "supervised": ignored entries are trained on as label 0, and counted; "shifted" and
        "shifted back": labels moved by one along their last axis.
        """
        key = (self._name(params), *(x.tobytes() for x in jax.tree.leaves(rows)), variant)
        if key not in self._kept:
            if len(self._kept) * params.nbytes > MOST_BYTES:
                self._kept.clear()
            self._kept[key] = self._part(params, rows, variant)
        return self._kept[key]

    def _name(self, params: np.ndarray) -> int:
        known = self._names.get(id(params))
        if known is None or known[0] is not params:
            if len(self._names) * params.nbytes > MOST_BYTES:
                self._names.clear()
            known = self._names[id(params)] = (params, hash(params.tobytes()))
        return known[1]

    def _part(self, params: np.ndarray, rows: Tree, variant: str) -> Part:
        if variant == "as given":
            return self._evaluate(params, rows)
        name, ignored = self.case.labels, self.case.ignore_index
        assert name is not None
        if variant == "counted":
            own = self.part(params, rows)
            filled = self.part(params, rows, "supervised")
            return {t: own[t]._replace(weight=filled[t].weight) for t in own}
        change: Callable[[np.ndarray], np.ndarray]
        if variant == "supervised":

            def change(labels: np.ndarray) -> np.ndarray:
                return np.where(labels == ignored, np.zeros_like(labels), labels)
        else:
            by = -1 if variant == "shifted" else 1

            def change(labels: np.ndarray) -> np.ndarray:
                moved = np.roll(labels, by, axis=-1)
                moved[..., -1 if by == -1 else 0] = ignored
                return moved

        return self._evaluate(params, with_labels(rows, name, change))

    def _evaluate(self, params: np.ndarray, rows: Tree) -> Part:
        tree = self.unflat(params)
        if self.case.sums is not None:
            given = self.case.sums(tree, rows)
            return {t: _term(s, w, g) for t, (s, w, g) in given.items()}
        with jax.enable_x64(True):
            totals, weights, grads = compiled(self.case.loss_fn)(tree, _wide(rows))
            return {t: _term(totals[t], weights[t], grads[t]) for t in totals}

    def noise(self, batches: list[Tree]) -> float:
        """Relative error of the loss's own gradient in the dtype of the step, at most.

        Measured, by running `loss_fn` in that dtype; where it cannot be run, a few roundings.
        """
        dtype = np.result_type(*(np.asarray(x).dtype for x in jax.tree.leaves(self.case.params)))
        worst = 8 * float(jnp.finfo(dtype).eps)
        if self.case.loss_fn is None or dtype == np.float64:
            return worst
        function = compiled(self.case.loss_fn)
        for rows in (p for batch in batches for p in parts(batch, self.case.replicas)):
            _, weights, grads = function(jax.tree.map(jnp.asarray, self.case.params), rows)
            for name, term in self.part(self.params, rows).items():
                size = norm(term.gradient)
                if float(weights[name]) and size:
                    worst = max(worst, norm(flat(grads[name]) - term.gradient) / size)
        return worst


@functools.lru_cache(maxsize=64)
def compiled(loss_fn: Any) -> Callable[..., Any]:
    """Totals, weights and gradients by term, jitted; one per loss function."""

    def all_terms(params: Tree, batch: Tree) -> tuple[Any, Any, Any]:
        def totals_of(params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
            terms = named_terms(loss_fn(params, batch))
            return {t: w.total for t, w in terms.items()}, {t: w.weight for t, w in terms.items()}

        totals, pull, weights = jax.vjp(totals_of, params, has_aux=True)
        grads = {}
        for name in totals:
            seed = {t: jnp.full_like(x, float(t == name)) for t, x in totals.items()}
            (grads[name],) = pull(seed)
        return totals, weights, grads

    return jax.jit(all_terms)


@functools.lru_cache(maxsize=64)
def compiled_weights(loss_fn: Any) -> Callable[..., Any]:
    """Weights by term, jitted."""

    def weights(params: Tree, batch: Tree) -> dict[str, Any]:
        return {t: w.weight for t, w in named_terms(loss_fn(params, batch)).items()}

    return jax.jit(weights)


def named_terms(value: Any) -> dict[str, Weighted]:
    """The terms of a loss by name; a single one is called "loss"."""
    if isinstance(value, Weighted):
        return {"loss": value}
    if isinstance(value, dict) and value and all(isinstance(v, Weighted) for v in value.values()):
        return value
    raise TypeError(
        f"loss_fn returned {type(value).__name__}: the doctor needs a jax_accum.Weighted, or a "
        "dict of them by term, so that it knows sums and weights."
    )


def _term(total: Any, weight: Any, gradient: Tree) -> Term:
    vector = flat(gradient)
    return Term(float(total), float(weight), vector, bool(np.isfinite(vector).all()))


def _wide(tree: Tree) -> Tree:
    return jax.tree.map(
        lambda x: x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x, tree
    )
