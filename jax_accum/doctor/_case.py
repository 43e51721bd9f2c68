"""Case: the small controlled problem that the doctor runs somebody's step on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_accum.doctor._recipe import Recipe

Tree = Any
FEWEST_EXAMPLES = 4


class UnusableStepError(ValueError):
    """The step cannot be examined at all: the message says why, and what to do."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What a step trains, small enough that every candidate can be computed beside it.

    The doctor cuts the examples into microbatches itself, with as different weights as they
    allow, and hands them to the step as a list of trees of NumPy arrays with a leading axis of
    `microbatch_size * replicas` rows; replica d owns the d-th equal share of the rows.

    Attributes:
      params: tree of arrays, in the dtype in which the step trains.
      examples: trees of NumPy arrays, all of one structure, *without* a leading axis. They
        should differ in supervised tokens. 16 or more are comfortable.
      loss_fn: `loss_fn(params, microbatch)`, in JAX, returns a `Weighted` or a dict of them by
        term. Differentiated in float64.
      sums: instead of `loss_fn`, for a loss that JAX cannot run:
        `sums(params, microbatch) -> {term: (total, weight, gradients)}` in float64, not divided.
      init: `init(params)` makes the state that `update` is given first; None hands `None` on.
      recipe: the optimizer inside `update`. Plain SGD tells most.
      microbatches: A, of a full group.
      microbatch_size: m, examples of one replica's microbatch.
      replicas: D.
      coefficients: of the terms, 1 where absent.
      labels: name of the entry of an example that holds the labels, or None. With it the doctor
        can ignore everything, count what is ignored, and shift by one.
      ignore_index: label of what is not supervised.
      examine: further probes that the step claims to pass: "ragged" (a group of fewer
        microbatches is divided by its own weight), "ignored" (a microbatch without supervision
        contributes nothing), "empty" (a group without any is skipped), "nonfinite" (a group
        with an inf is skipped). All that the case allows but "nonfinite" by default.
      dropout: the step draws random masks: only whether they are fresh is examined.
      observe: `observe(opt_state)` returns what else can be seen, by name: "mu" (first moment),
        "ema" (average of the parameters), as trees like `params`. Those of Optax's Adam are found
        without it.
      redraw: `redraw(seed)` returns other examples, for when these are too alike to tell.
      seed: of the choice of microbatches.

    Example:
      >>> import numpy as np, jax.numpy as jnp, jax_accum as ja
      >>> def loss_fn(w, batch):
      ...     told = batch["labels"] != -100
      ...     error = jnp.where(told, jnp.tanh(batch["x"] @ w) - batch["labels"], 0)
      ...     return ja.Weighted(jnp.sum(error**2), jnp.sum(told))
      >>> rng = np.random.default_rng(0)
      >>> labels = np.where(rng.random((16, 6)) < 0.6, 1.0, -100).astype(np.float32)
      >>> x = rng.normal(size=(16, 6, 3)).astype(np.float32)
      >>> case = ja.doctor.Case(
      ...     params=np.ones(3, np.float32), loss_fn=loss_fn, labels="labels",
      ...     examples=[{"x": a, "labels": b} for a, b in zip(x, labels, strict=True)])
      >>> case.microbatches, case.recipe.kind
      (4, 'sgd')
    """

    params: Tree
    examples: Sequence[Tree]
    loss_fn: Callable[..., Any] | None = None
    sums: Callable[..., Any] | None = None
    init: Callable[[Tree], Any] | None = None
    recipe: Recipe = dataclasses.field(default_factory=Recipe)
    microbatches: int = 4
    microbatch_size: int = 2
    replicas: int = 1
    coefficients: Mapping[str, float] | None = None
    labels: str | None = None
    ignore_index: int = -100
    examine: Sequence[str] | None = None
    dropout: bool = False
    observe: Callable[[Any], Mapping[str, Any]] | None = None
    redraw: Callable[[int], Sequence[Tree]] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("microbatches", "microbatch_size", "replicas"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}.")
        if self.microbatches < 2:
            raise ValueError("microbatches=1 accumulates nothing: give the doctor 2 or more.")
        if (self.loss_fn is None) == (self.sums is None):
            raise ValueError(
                "give exactly one of loss_fn (in JAX) and sums (from any framework): "
                f"got loss_fn={self.loss_fn!r} and sums={self.sums!r}."
            )
        if not isinstance(self.recipe, Recipe):
            raise TypeError(f"recipe must be a doctor.Recipe, got {self.recipe!r}.")
        check_examples(self.examples, self.labels)
        needed = max(FEWEST_EXAMPLES, self.microbatch_size * self.replicas * 2)
        if len(self.examples) < needed:
            raise ValueError(
                f"examples holds {len(self.examples)}, and two different microbatches of "
                f"microbatch_size={self.microbatch_size} on replicas={self.replicas} need "
                f"{needed}: give more examples, or smaller microbatches."
            )
        if not jax.tree.leaves(self.params):
            raise ValueError("params holds no array: there is no gradient to look at.")
        unknown = set(self.examine or ()) - {"ragged", "ignored", "empty", "nonfinite"}
        if unknown:
            raise ValueError(
                f"examine names {sorted(unknown)}; it may hold 'ragged', 'ignored', 'empty' and "
                "'nonfinite'."
            )

    @property
    def examined(self) -> list[str]:
        """The further probes that this case asks for and allows."""
        wanted = self.examine if self.examine is not None else ("ragged", "ignored", "empty")
        allowed = {"ragged"}
        if self.labels is not None:
            allowed |= {"ignored", "empty"}
        if float_entry(self.examples[0], self.labels) is not None:
            allowed |= {"nonfinite"}
        return [probe for probe in wanted if probe in allowed]

    def replace(self, **changes: Any) -> Case:
        """The same case with some attributes changed."""
        return dataclasses.replace(self, **changes)


def check_examples(examples: Sequence[Tree], labels: str | None) -> None:
    """Raises if examples cannot be stacked, or have no such labels."""
    if not len(examples):
        raise ValueError("examples is empty: give 16 or so, with differing token counts.")
    first = signature(examples[0])
    for index, example in enumerate(examples):
        if signature(example) != first:
            raise ValueError(
                f"examples[{index}] is not like examples[0] ({signature(example)} against "
                f"{first}): pad them to one shape, with ignored labels in the padding."
            )
    if labels is not None and (not isinstance(examples[0], Mapping) or labels not in examples[0]):
        raise ValueError(f"labels={labels!r} is no entry of an example: name the one that is.")


def signature(tree: Tree) -> Any:
    """Structure, shapes and dtypes of a tree, comparable."""
    leaves, structure = jax.tree.flatten(tree)
    return str(structure), tuple((np.shape(x), np.asarray(x).dtype.name) for x in leaves)


def stack(examples: Sequence[Tree]) -> Tree:
    """Examples as one microbatch, with a leading axis."""
    return jax.tree.map(lambda *rows: np.stack([np.asarray(row) for row in rows]), *examples)


def parts(microbatch: Tree, replicas: int) -> list[Tree]:
    """The equal shares of the rows, by replica."""
    rows = jax.tree.leaves(microbatch)[0].shape[0] // replicas
    return [
        jax.tree.map(lambda x, d=d: x[d * rows : (d + 1) * rows], microbatch)
        for d in range(replicas)
    ]


def float_entry(example: Tree, labels: str | None) -> Any:
    """The path of the first floating array that is not the labels, or None."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(example):
        name = getattr(path[0], "key", None) if path else None
        if np.issubdtype(np.asarray(leaf).dtype, np.floating) and (
            labels is None or name != labels
        ):
            return path
    return None


def with_labels(microbatch: Tree, labels: str, change: Callable[[np.ndarray], np.ndarray]) -> Tree:
    """The microbatch with its labels changed; the original stays as it is."""
    return {**microbatch, labels: change(np.array(microbatch[labels]))}


def poisoned(microbatch: Tree, labels: str | None) -> Tree:
    """The microbatch with an inf in its first floating array."""
    target = float_entry(jax.tree.map(lambda x: x[0], microbatch), labels)

    def change(path: Any, leaf: Any) -> Any:
        leaf = np.array(leaf)
        if path == target:
            leaf.reshape(-1)[0] = np.inf
        return leaf

    return jax.tree_util.tree_map_with_path(change, microbatch)
