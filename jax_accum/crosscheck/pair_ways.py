"""The two ways in which a pair's JAX loss is accumulated, and its batches in both frameworks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jax_accum as ja
from jax_accum.crosscheck.full_jax import Recipe, terms_of


def across(
    recipe: Recipe, microbatches: int, params: Any, state: Any, batch: Mapping[str, Any]
) -> tuple[Any, Any, float]:
    """`ja.MultiSteps`, a call per microbatch."""
    opt, call = _call(recipe, microbatches)
    state = opt.init(params) if state is None else state
    total = weight = 0.0
    for part in cut(batch, microbatches):
        params, state, term = call(params, state, part, len(next(iter(part.values()))))
        total, weight = total + float(term.total), weight + float(term.weight)
    return params, state, total / weight if weight else 0.0


@functools.cache
def _call(recipe: Recipe, microbatches: int) -> tuple[ja.MultiSteps, Callable[..., Any]]:
    opt = ja.MultiSteps(recipe.inner(), microbatches)

    @jax.jit
    def call(params: Any, state: Any, batch: Any, examples: Any) -> Any:
        def mean(params: Any) -> tuple[Any, Any]:
            terms = terms_of(recipe.loss(params, batch))
            if len(terms) > 1:
                raise ValueError(
                    f"the loss has the terms {list(terms)}, and one weight per call cannot carry "
                    "their denominators: give ways=('inone',)"
                )
            (term,) = terms.values()
            return ja.Weighted(*term).mean, term

        gradient, term = jax.grad(mean, has_aux=True)(params)
        params, state = opt.apply(gradient, state, params, weight=term.weight, examples=examples)
        return params, state, term

    return opt, call


def in_one(
    recipe: Recipe, microbatches: int, params: Any, state: Any, batch: Mapping[str, Any]
) -> tuple[Any, Any, float]:
    """`ja.make_train_step`, a call per update."""
    state = ja.guard(recipe.inner()).init(params) if state is None else state
    examples = len(next(iter(batch.values())))
    params, state, metrics = _step(recipe, microbatches)(params, state, batch, examples=examples)
    return params, state, float(metrics["loss"])


@functools.cache
def _step(recipe: Recipe, microbatches: int) -> Callable[..., Any]:
    return ja.make_train_step(
        recipe.loss,
        ja.guard(recipe.inner()),
        microbatches,
        coefficients=dict(recipe.coefficients) or None,
        donate=False,
    )


def cut(batch: Mapping[str, Any], microbatches: int) -> list[dict[str, Any]]:
    """Rows in so many parts of one size.

    >>> [part["x"].tolist() for part in cut({"x": np.arange(4)}, 2)]
    [[0, 1], [2, 3]]
    """
    size = len(next(iter(batch.values()))) // microbatches
    starts = range(0, size * microbatches, size)
    return [{name: rows[i : i + size] for name, rows in batch.items()} for i in starts]


def arrays_of(batch: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A batch as JAX arrays, floating ones in the dtype of the run."""
    return {name: jnp.asarray(_cast(array, dtype)) for name, array in batch.items()}


def tensors_of(batch: Mapping[str, Any], dtype: str) -> dict[str, torch.Tensor]:
    """A batch as tensors, floating ones in the dtype of the run, integers int64."""
    made = {n: torch.from_numpy(np.ascontiguousarray(_cast(a, dtype))) for n, a in batch.items()}
    integers = (torch.int8, torch.uint8, torch.int16, torch.int32)
    return {n: t.long() if t.dtype in integers else t for n, t in made.items()}


def _cast(array: Any, dtype: str) -> np.ndarray:
    array = np.asarray(array)
    return array.astype(dtype) if np.issubdtype(array.dtype, np.floating) else array
