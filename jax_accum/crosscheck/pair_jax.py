"""A pair's runs in JAX: whole batches, microbatches put together exactly, and the ways."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_accum as ja
from jax_accum.crosscheck import pair_ways
from jax_accum.crosscheck.full_jax import Recipe, terms_of, whole_gradient
from jax_accum.crosscheck.jax_recipe import apply_inner, tapped
from jax_accum.crosscheck.maps import Arrays
from jax_accum.crosscheck.pairs import Pair, PairCase
from jax_accum.crosscheck.rules import named_arrays, rebuilt
from jax_accum.crosscheck.trace import Trace, tree_norm


class JaxRuns:
    """The JAX side of a pair.

    Args:
      pair: the pair.
      weights: initial, float64 by JAX path.
    """

    def __init__(self, pair: Pair, weights: Arrays) -> None:
        self.pair = pair
        self.weights = weights

    def recipe(self, optimizer: str) -> Recipe:
        """Equal recipes share what they compile."""
        coefficients = dict(self.pair.coefficients or {})
        return Recipe(self.pair.jax_loss, optimizer, False, tuple(coefficients.items()))

    def undivided(self, optimizer: str, dtype: str) -> Trace:
        """Whole batches."""
        recipe = self.recipe(optimizer)

        def gradient(params: Any, batch: Any) -> tuple[float, Any]:
            loss, found = whole_gradient(recipe)(params, pair_ways.arrays_of(batch, dtype), 1.0)
            return float(loss), found

        return self._train(recipe, dtype, gradient)

    def pieces(self, optimizer: str, microbatches: int, dtype: str) -> Trace:
        """Microbatches: each gradient by a plain program, added up in float64."""
        recipe = self.recipe(optimizer)

        def gradient(params: Any, batch: Any) -> tuple[float, Any]:
            cut = pair_ways.cut(pair_ways.arrays_of(batch, dtype), microbatches)
            counted = [_weights(recipe)(params, part) for part in cut]
            by_term = dict(recipe.coefficients)
            whole = {name: sum(float(own[name]) for own in counted) for name in counted[0]}
            factors = {n: by_term.get(n, 1.0) / w if w else 0.0 for n, w in whole.items()}
            loss, total = 0.0, {path: np.zeros(a.shape) for path, a in self.weights.items()}
            for part, own in zip(cut, counted, strict=True):
                names = tuple(name for name, weight in own.items() if weight)
                if not names:
                    continue  # whatever its gradient holds, it adds nothing
                value, found = _piece(recipe, names)(params, part, factors)
                loss += float(value)
                for path, array in named_arrays(found).items():
                    total[path] += array
            return loss, rebuilt(params, {n: jnp.asarray(a, dtype) for n, a in total.items()})

        return self._train(recipe, dtype, gradient)

    def accumulated(self, case: PairCase) -> Trace:
        """Batches cut into microbatches, by the library."""
        recipe, trace = self.recipe(case.optimizer), Trace()
        with jax.enable_x64(case.dtype == "float64"):
            params = self.start(case.dtype)
            update = pair_ways.across if case.way == "across" else pair_ways.in_one
            state: Any = None
            for batch in self.pair.batches:
                arrays = pair_ways.arrays_of(batch, case.dtype)
                params, state, loss = update(recipe, case.microbatches, params, state, arrays)
                found = named_arrays(tapped(state))
                trace.add(loss, tree_norm(found), found, named_arrays(params))
            trace.counters = ja.counts(state)
        return trace

    def start(self, dtype: str) -> Any:
        """The initial parameters, a tree like the pair's weights."""
        arrays = {path: jnp.asarray(array, dtype) for path, array in self.weights.items()}
        return rebuilt(self.pair.weights, arrays)

    def _train(
        self, recipe: Recipe, dtype: str, gradient: Callable[[Any, Any], tuple[float, Any]]
    ) -> Trace:
        """An update for each batch; ``gradient(params, batch)`` is its loss and gradient."""
        trace = Trace()
        with jax.enable_x64(dtype == "float64"):
            params = self.start(dtype)
            state = recipe.inner().init(params)
            for batch in self.pair.batches:
                loss, found = gradient(params, batch)
                params, state = apply_inner(recipe)(params, state, found)
                arrays = named_arrays(found)
                trace.add(loss, tree_norm(arrays), arrays, named_arrays(params))
        return trace


@functools.cache
def _weights(recipe: Recipe) -> Callable[..., Any]:
    """Jitted: the weights of a microbatch by term."""

    @jax.jit
    def weights(params: Any, batch: Any) -> Any:
        terms = terms_of(recipe.loss(params, batch))
        return {name: jnp.asarray(term.weight) for name, term in terms.items()}

    return weights


@functools.cache
def _piece(recipe: Recipe, names: tuple[str, ...]) -> Callable[..., Any]:
    """Jitted: the sum over these terms of ``factor * sum``, and its gradient."""

    def value(params: Any, batch: Any, factors: Any) -> Any:
        terms = terms_of(recipe.loss(params, batch))
        return sum(factors[name] * terms[name].total for name in names)

    return jax.jit(jax.value_and_grad(value))
