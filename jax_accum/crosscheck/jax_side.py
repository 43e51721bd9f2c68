"""The JAX side: the library's two ways to accumulate, and the undivided runs they are judged by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_accum as ja
from jax_accum.crosscheck.data import Group, pad
from jax_accum.crosscheck.jax_recipe import JaxRecipe, Tree, apply_inner, mean_gradient, tapped
from jax_accum.crosscheck.maps import Arrays, flatten, unflatten
from jax_accum.crosscheck.trace import Trace, tree_norm


class Seen(NamedTuple):
    """What one update showed: loss of its group, gradient norm, the gradient itself (a tree)."""

    loss: Any
    norm: Any
    gradient: Tree


class Loop(Protocol):
    """A way to train: the library's, or a planted fault's."""

    def start(self, params: Tree) -> Tree:
        """State for these parameters."""

    def update(self, params: Tree, state: Tree, group: Group) -> tuple[Tree, Tree, Seen]:
        """Trains on one group. ``params`` and ``state`` may be donated."""

    def counters(self, state: Tree) -> dict[str, int]:
        """Totals so far."""


@dataclass
class Undivided:
    """Whole batches: nothing of the library but its loss. What the ways are judged by."""

    recipe: JaxRecipe
    rows: int

    def start(self, params: Tree) -> Tree:
        """State of the inner optimizer."""
        return self.recipe.inner().init(params)

    def update(self, params: Tree, state: Tree, group: Group) -> tuple[Tree, Tree, Seen]:
        """One gradient of the whole group, one update."""
        batch = pad(group.examples, self.rows)
        (loss, _), gradient = mean_gradient(self.recipe.loss)(params, batch)
        params, state = apply_inner(self.recipe)(params, state, gradient)
        return params, state, Seen(loss, optax.tree.norm(gradient), gradient)

    def counters(self, state: Tree) -> dict[str, int]:
        """Nothing is counted."""
        del state
        return {}


@dataclass
class Pieces:
    """Microbatches: each gradient by a plain program, added up in float64 and divided once."""

    recipe: JaxRecipe
    microbatch_size: int

    def start(self, params: Tree) -> Tree:
        """State of the inner optimizer."""
        return self.recipe.inner().init(params)

    def update(self, params: Tree, state: Tree, group: Group) -> tuple[Tree, Tree, Seen]:
        """One update from the microbatches' gradients, put together without rounding."""
        total = {path: np.zeros(leaf.shape) for path, leaf in flatten(params).items()}
        loss, weight = 0.0, 0
        for batch in group.microbatches(self.microbatch_size):
            (mean, tokens), gradient = mean_gradient(self.recipe.loss)(params, batch)
            loss, weight = loss + float(mean) * int(tokens), weight + int(tokens)
            for path, array in _numpy(gradient).items():
                total[path] += int(tokens) * array.astype(np.float64)
        dtypes = {path: leaf.dtype for path, leaf in flatten(params).items()}
        exact = {path: array / weight for path, array in total.items()}
        gradient = unflatten({n: jnp.asarray(a, dtypes[n]) for n, a in exact.items()})
        params, state = apply_inner(self.recipe)(params, state, gradient)
        return params, state, Seen(loss / weight, tree_norm(exact), gradient)

    def counters(self, state: Tree) -> dict[str, int]:
        """Nothing is counted."""
        del state
        return {}


@dataclass
class AcrossCalls:
    """`ja.MultiSteps`: a call per microbatch, the last of a ragged group with ``flush``."""

    recipe: JaxRecipe
    microbatches: int
    microbatch_size: int
    opt: ja.MultiSteps = field(init=False)

    def __post_init__(self) -> None:
        self.opt = ja.MultiSteps(self.recipe.inner(), self.microbatches)
        self._step = _across_calls(self.recipe, self.microbatches)

    def start(self, params: Tree) -> Tree:
        """State of the `MultiSteps`."""
        return self.opt.init(params)

    def update(self, params: Tree, state: Tree, group: Group) -> tuple[Tree, Tree, Seen]:
        """As many calls as the group has microbatches."""
        loss, weight = 0.0, 0.0
        batches = list(group.microbatches(self.microbatch_size))
        for i, batch in enumerate(batches):
            (mean, tokens), gradient = mean_gradient(self.recipe.loss)(params, batch)
            loss, weight = loss + mean * tokens, weight + tokens
            examples = min(self.microbatch_size, len(group.examples) - i * self.microbatch_size)
            flush = i == len(batches) - 1
            params, state = self._step(params, state, gradient, tokens, examples, flush)
        if not self.opt.has_updated(state):
            raise AssertionError("the last microbatch of a group made no update")
        gradient = tapped(state)
        return params, state, Seen(loss / weight, optax.tree.norm(gradient), gradient)

    def counters(self, state: Tree) -> dict[str, int]:
        """As the library counts."""
        return ja.counts(state)


@cache
def _across_calls(recipe: JaxRecipe, microbatches: int) -> Callable[..., Any]:
    opt = ja.MultiSteps(recipe.inner(), microbatches)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(
        params: Tree, state: Tree, gradient: Tree, tokens: Any, examples: Any, flush: Any
    ) -> tuple[Tree, Tree]:
        return opt.apply(gradient, state, params, weight=tokens, examples=examples, flush=flush)

    return step


@dataclass
class InOneCall:
    """`ja.make_train_step`: a call per update, the group's microbatches stacked in its batch."""

    recipe: JaxRecipe
    microbatches: int
    microbatch_size: int

    def start(self, params: Tree) -> Tree:
        """State of the guarded inner optimizer."""
        return ja.guard(self.recipe.inner()).init(params)

    def update(self, params: Tree, state: Tree, group: Group) -> tuple[Tree, Tree, Seen]:
        """One call; a ragged group is filled up with rows that weigh nothing."""
        batch = pad(group.examples, self.microbatches * self.microbatch_size)
        step = _in_one_call(self.recipe, self.microbatches)
        params, state, metrics = step(params, state, batch, examples=len(group.examples))
        return params, state, Seen(metrics["loss"], metrics["grad_norm"], tapped(state))

    def counters(self, state: Tree) -> dict[str, int]:
        """As the library counts."""
        return ja.counts(state)


@cache
def _in_one_call(recipe: JaxRecipe, microbatches: int) -> Callable[..., Any]:
    return ja.make_train_step(recipe.loss, ja.guard(recipe.inner()), microbatches)


WAYS: dict[str, Callable[[JaxRecipe, int, int], Loop]] = {
    "across": AcrossCalls,
    "inone": InOneCall,
}


def run(loop: Loop, weights: Arrays, groups: Sequence[Group], dtype: str) -> Trace:
    """Trains from the given weights, one update per group, in 64-bit mode for float64 alone.

    Args:
      loop: the way.
      weights: initial weights by path, float64.
      groups: the examples of each update.
      dtype: ``float32`` or ``float64``, of parameters, activations and accumulators.

    Returns:
      `Trace` in NumPy.

    Raises:
      AssertionError: the parameters came out in another dtype.
    """
    trace = Trace()
    with jax.enable_x64(dtype == "float64"):
        params = unflatten({path: jnp.asarray(array, dtype) for path, array in weights.items()})
        state = loop.start(params)
        for group in groups:
            params, state, seen = loop.update(params, state, group)
            # Copies: the next update may write over what it is given.
            after, gradient = _numpy(params), _numpy(seen.gradient)
            if any(array.dtype != dtype for array in after.values()):
                raise AssertionError(f"parameters of a {dtype} run left that dtype")
            trace.add(float(seen.loss), float(seen.norm), gradient, after)
        trace.counters = loop.counters(state)
    return trace


def _numpy(tree: Tree) -> Arrays:
    return {path: np.array(leaf) for path, leaf in flatten(tree).items()}
