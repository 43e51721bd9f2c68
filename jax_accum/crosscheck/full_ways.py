"""Five ways to accumulate in JAX: each an ordinary training loop of the library.

A loss scale, several terms and replicas are handled as the library's documentation says, and
nowhere is a denominator taken from one microbatch or one replica.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_accum as ja
from jax_accum.crosscheck.errors import InputError
from jax_accum.crosscheck.full_data import Batch, RowGroup, pad_rows
from jax_accum.crosscheck.full_jax import Recipe, terms_of
from jax_accum.crosscheck.jax_recipe import tapped
from jax_accum.crosscheck.jax_side import Seen
from jax_accum.crosscheck.matrix import EXAMPLES_PER_UPDATE, REPLICAS

Tree = Any
SAME, ROWS = PartitionSpec(), PartitionSpec("data")


def mesh() -> Mesh:
    """Two devices along ``data``.

    Raises:
      InputError: JAX has only one.
    """
    devices = jax.devices("cpu")
    if len(devices) < REPLICAS:
        raise InputError(
            f"this case needs {REPLICAS} CPU devices and JAX has {len(devices)}: set "
            "XLA_FLAGS=--xla_force_host_platform_device_count=2 before JAX is used"
        )
    return Mesh(np.array(devices[:REPLICAS]), ("data",), axis_types=(AxisType.Auto,))


@dataclass
class AcrossCalls:
    """`ja.MultiSteps`, a call per microbatch; with ``replicas`` inside a `jax.shard_map`."""

    recipe: Recipe
    microbatches: int
    replicas: int = 1

    def __post_init__(self) -> None:
        self.opt = _multi_steps(self.recipe, self.microbatches, self.replicas)

    def start(self, params: Tree) -> Tree:
        """State of the `MultiSteps`."""
        return self.opt.init(params, replicas=self.replicas if self.replicas > 1 else None)

    def update(self, params: Tree, state: Tree, group: RowGroup) -> tuple[Tree, Tree, Seen]:
        """A call for each turn of the replicas; the last one with ``flush``."""
        call = _one_device(self.recipe, self.microbatches)
        if self.replicas > 1:
            call = _mapped(self.recipe, self.microbatches)
        by_term = dict(self.recipe.coefficients)
        # Counted from the labels before the first call: several terms have several denominators,
        # and one weight per call cannot carry them.
        whole = {name: np.float32(max(group.weights[name], 1)) for name in by_term}
        turns = group.pieces(self.microbatches, self.replicas)
        totals: dict[str, float] = {}
        weights: dict[str, float] = {}
        for i, turn in enumerate(turns):
            batch = joined(turn, EXAMPLES_PER_UPDATE // (self.microbatches * self.replicas))
            examples = np.array([len(piece["tokens"]) for piece in turn], np.int32)
            params, state, terms = call(params, state, batch, whole, examples, i == len(turns) - 1)
            for name, term in terms.items():
                totals[name] = totals.get(name, 0.0) + float(term.total)
                weights[name] = weights.get(name, 0.0) + float(term.weight)
        loss = sum(
            by_term.get(name, 1.0) * totals[name] / weights[name] if weights[name] else 0.0
            for name in totals
        )
        gradient = tapped(state)
        return params, state, Seen(loss, None, gradient)

    def counters(self, state: Tree) -> dict[str, int]:
        """As the library counts."""
        return ja.counts(state)


@cache
def _multi_steps(recipe: Recipe, microbatches: int, replicas: int) -> ja.MultiSteps:
    several = bool(recipe.coefficients)
    return ja.MultiSteps(
        recipe.guarded() if recipe.scaled else recipe.inner(),
        microbatches,
        use_grad_mean=not several,
        loss_reduction="sum" if several else "mean",
        axis_name="data" if replicas > 1 else None,
    )


def _call(recipe: Recipe, opt: ja.MultiSteps, axis: str | None) -> Callable[..., Any]:
    """The body of a call; with ``axis``, of one replica's."""
    by_term = dict(recipe.coefficients)

    def call(
        params: Tree, state: Tree, batch: Batch, whole: Any, examples: Any, flush: Any
    ) -> tuple[Tree, Tree, Any]:
        def objective(params: Tree) -> tuple[Any, Any]:
            terms = terms_of(recipe.loss(params, batch))
            if by_term:
                some = {name: jnp.asarray(t.weight) > 0 for name, t in terms.items()}
                sums = {name: jnp.where(some[name], t.total, 0) for name, t in terms.items()}
                loss = sum(by_term[name] * sums[name] / whole[name] for name in sums)
            else:
                loss = terms["loss"].mean
            return loss * recipe.scale_of(state), terms

        # Or jax.grad reduces over the replicas in every call.
        own = jax.lax.pcast(params, axis, to="varying") if axis else params
        gradient, terms = jax.grad(objective, has_aux=True)(own)
        params, state = opt.apply(
            gradient,
            state,
            params,
            weight=terms[recipe.first].weight,
            examples=examples[0],
            microbatches=(examples[0] > 0).astype(jnp.int32),
            flush=flush,
        )
        return params, state, jax.lax.psum(terms, axis) if axis else terms

    return call


@cache
def _one_device(recipe: Recipe, microbatches: int) -> Callable[..., Any]:
    opt = _multi_steps(recipe, microbatches, 1)
    return jax.jit(_call(recipe, opt, None), donate_argnums=(0, 1))


@cache
def _mapped(recipe: Recipe, microbatches: int) -> Callable[..., Any]:
    opt = _multi_steps(recipe, microbatches, REPLICAS)
    body = _call(recipe, opt, "data")

    @jax.jit
    def call(params: Tree, state: Any, *rest: Any) -> Any:
        specs = opt.state_specs(state)
        mapped = jax.shard_map(
            body,
            mesh=mesh(),
            in_specs=(SAME, specs, ROWS, SAME, ROWS, SAME),
            out_specs=(SAME, specs, SAME),
        )
        return mapped(params, state, *rest)

    return call


@dataclass
class InOneCall:
    """`ja.make_train_step`, a call per update; with ``replicas`` over a mesh."""

    recipe: Recipe
    microbatches: int
    replicas: int = 1

    def start(self, params: Tree) -> Tree:
        """State of the guarded inner optimizer."""
        return self.recipe.guarded().init(params)

    def update(self, params: Tree, state: Tree, group: RowGroup) -> tuple[Tree, Tree, Seen]:
        """One call; a group is filled up with rows that weigh nothing."""
        batch: Any = by_device(group, self.microbatches, self.replicas)
        if self.replicas > 1:
            batch = jax.device_put(batch, NamedSharding(mesh(), ROWS))
        step = _step(self.recipe, self.microbatches, self.replicas)
        params, state, metrics = step(params, state, batch, examples=group.rows)
        return params, state, Seen(metrics["loss"], metrics["grad_norm"], tapped(state))

    def counters(self, state: Tree) -> dict[str, int]:
        """As the library counts."""
        return ja.counts(state)


@cache
def _step(recipe: Recipe, microbatches: int, replicas: int) -> Callable[..., Any]:
    by_term = dict(recipe.coefficients)
    return ja.make_train_step(
        recipe.loss,
        recipe.guarded(),
        microbatches,
        mesh=mesh() if replicas > 1 else None,
        coefficients=by_term or None,
        tokens_term=recipe.first,
    )


@dataclass
class Pmap:
    """`ja.accumulated_value_and_grad` inside a `jax.pmap`: parameters are on every device."""

    recipe: Recipe
    microbatches: int

    def start(self, params: Tree) -> Tree:
        """State of the guarded inner optimizer, of one device; `update` hands it to all."""
        return self.recipe.guarded().init(params)

    def update(self, params: Tree, state: Tree, group: RowGroup) -> tuple[Tree, Tree, Seen]:
        """One call."""
        rows = by_device(group, self.microbatches, REPLICAS)
        batch = {n: x.reshape(REPLICAS, -1, *x.shape[1:]) for n, x in rows.items()}
        everywhere = functools.partial(jax.tree.map, lambda x: jnp.stack([x] * REPLICAS))
        step = _pmapped(self.recipe, self.microbatches)
        examples = np.full(REPLICAS, group.rows, np.int32)
        out = step(everywhere(params), everywhere(state), batch, examples)
        for leaf in jax.tree.leaves(out):
            first, second = np.asarray(leaf)
            if not np.array_equal(first, second, equal_nan=True):
                raise AssertionError("the replicas of a pmap came apart")
        params, state, loss, norm = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[0]), out)
        return params, state, Seen(loss, norm, tapped(state))

    def counters(self, state: Tree) -> dict[str, int]:
        """As the library counts."""
        return ja.counts(state)


@cache
def _pmapped(recipe: Recipe, microbatches: int) -> Callable[..., Any]:
    tx = recipe.guarded()
    value_and_grad = ja.accumulated_value_and_grad(
        recipe.loss,
        microbatches,
        axis_name="replica",
        coefficients=dict(recipe.coefficients) or None,
        grad_norm=True,
    )

    @partial(jax.pmap, axis_name="replica", devices=jax.devices("cpu")[:REPLICAS])
    def step(params: Tree, state: Tree, batch: Batch, examples: Any) -> Any:
        scale = recipe.scale_of(state)
        (loss, info), gradient = value_and_grad(params, batch, loss_scale=scale)
        tokens = info.weights[recipe.first]
        updates, state = tx.update(
            gradient,
            state,
            params,
            weight=tokens,
            examples=examples,
            microbatches=info.counts["microbatches"],
        )
        return optax.apply_updates(params, updates), state, loss, info.grad_norm / scale

    return step


def joined(turn: list[Batch], size: int) -> Batch:
    """The pieces of a turn below each other, each padded to ``size`` rows."""
    padded = [pad_rows(piece, size) for piece in turn]
    return {name: np.concatenate([piece[name] for piece in padded]) for name in padded[0]}


def by_device(group: RowGroup, microbatches: int, replicas: int) -> Batch:
    """A whole group, its rows placed so that each replica finds its own pieces on its device."""
    size = EXAMPLES_PER_UPDATE // (microbatches * replicas)
    turns = group.pieces(microbatches, replicas)
    nothing = {name: array[:0] for name, array in group.arrays.items()}
    turns += [[nothing] * replicas] * (microbatches - len(turns))
    place_AxDxM = ja.microbatch_rows(EXAMPLES_PER_UPDATE, microbatches, replicas)
    batch = joined([piece for turn in turns for piece in turn], size)
    placed = {name: np.zeros_like(array) for name, array in batch.items()}
    for name, array in batch.items():
        placed[name][place_AxDxM.ravel()] = array
    return placed


def make_way(way: str, recipe: Recipe, microbatches: int) -> AcrossCalls | InOneCall | Pmap:
    """The loop of this name, one of the values of the axis ``way``."""
    if way == "pmap":
        return Pmap(recipe, microbatches)
    if way in ("across", "shardmap"):
        return AcrossCalls(recipe, microbatches, REPLICAS if way == "shardmap" else 1)
    return InOneCall(recipe, microbatches, REPLICAS if way == "jit" else 1)
