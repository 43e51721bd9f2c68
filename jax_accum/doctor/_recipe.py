"""Recipe: the optimizer that a step runs, and the same in float64 NumPy, with its faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_accum.doctor._vectors import norm

KINDS = ("sgd", "adamw")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The optimizer inside `update`, as the doctor is to compute it.

    An update number t (from 0) with gradient g and parameters p: g is clipped; sgd:
    `v = momentum * v + g`; adamw: the bias-corrected moments of g, `m / (sqrt(v) + eps)`; then
    `p -= rate(t) * (v + weight_decay * p)`, the decay decoupled, as in `optax.adamw`,
    `optax.chain(optax.add_decayed_weights(wd), optax.sgd(rate))` and `torch.optim.AdamW`.

    Attributes:
      kind: "sgd" or "adamw".
      learning_rate: a number, or a function from the number of updates made to one.
      momentum: of sgd.
      b1: decay of adamw's first moment.
      b2: decay of adamw's second moment.
      eps: of adamw.
      weight_decay: decoupled, times the learning rate.
      clip_norm: limit of the gradient's global norm, or None.
      ema_decay: of an average of the parameters, taken after each update: `ema = d * ema +
        (1 - d) * p`, from the initial parameters. Only seen through `Case.observe`.

    Raises:
      ValueError: an unknown kind, or a number out of its range.

    Example:
      >>> import jax_accum as ja
      >>> ja.doctor.Recipe("adamw", learning_rate=1e-3, weight_decay=0.1, clip_norm=1.0).kind
      'adamw'
    """

    kind: str = "sgd"
    learning_rate: float | Callable[[int], Any] = 1.0
    momentum: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = None
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}, got {self.kind!r}.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be above 0, got {self.clip_norm}: None is no limit.")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay}.")

    @property
    def scheduled(self) -> bool:
        """Whether the learning rate changes over the updates."""
        return callable(self.learning_rate)

    @property
    def plain(self) -> bool:
        """Whether an update is the gradient times a number."""
        return (
            self.kind == "sgd"
            and not (self.momentum or self.weight_decay or self.scheduled)
            and self.clip_norm is None
        )

    def rate(self, count: int) -> float:
        """The learning rate when `count` updates have been made."""
        return float(
            self.learning_rate(count) if callable(self.learning_rate) else self.learning_rate
        )


@dataclasses.dataclass
class Optimizer:
    """A recipe at work on flat float64 vectors.

    Attributes:
      recipe: what it computes.
      ema: average of the parameters.
      velocity: sgd's, or adamw's first moment.
      second: adamw's second moment.
      updates: how many it made.
    """

    recipe: Recipe
    ema: np.ndarray
    velocity: np.ndarray
    second: np.ndarray
    updates: int = 0

    @classmethod
    def start(cls, recipe: Recipe, params: np.ndarray) -> Optimizer:
        """Its state before the first update."""
        return cls(recipe, params.copy(), np.zeros_like(params), np.zeros_like(params))

    def copy(self) -> Optimizer:
        """One that can go on by itself."""
        return dataclasses.replace(self)

    def step(
        self,
        gradient: np.ndarray,
        params: np.ndarray,
        *,
        clip: bool = True,
        rate_count: int | None = None,
        bias_count: int | None = None,
        decays: int = 1,
        averages: int = 1,
    ) -> np.ndarray:
        """One update: the new parameters. The counts are those of a step that miscounts."""
        recipe = self.recipe
        if clip and recipe.clip_norm is not None:
            gradient = clipped(gradient, recipe.clip_norm)
        rate = recipe.rate(self.updates if rate_count is None else rate_count)
        if recipe.kind == "sgd":
            self.velocity = recipe.momentum * self.velocity + gradient
            direction = self.velocity
        else:
            self.velocity = recipe.b1 * self.velocity + (1 - recipe.b1) * gradient
            square = np.square(gradient)
            square *= 1 - recipe.b2
            square += recipe.b2 * self.second
            self.second = square
            count = self.updates + 1 if bias_count is None else bias_count
            root = np.sqrt(self.second / (1 - recipe.b2**count))
            root += recipe.eps
            direction = self.velocity / (1 - recipe.b1**count)
            direction /= root
        if decays == 1:
            new = params - rate * (direction + recipe.weight_decay * params)
        else:
            new = params * (1 - rate * recipe.weight_decay) ** decays - rate * direction
        if recipe.ema_decay is not None:
            for _ in range(averages):
                self.ema = recipe.ema_decay * self.ema + (1 - recipe.ema_decay) * new
        self.updates += 1
        return new

    def visible(self) -> dict[str, Any]:
        """What an observer of the state could see."""
        seen = {"mu": self.velocity} if self.recipe.kind == "adamw" else {}
        return seen if self.recipe.ema_decay is None else {**seen, "ema": self.ema}


def clipped(gradient: np.ndarray, limit: float) -> np.ndarray:
    """The gradient, shortened to the limit if it is longer."""
    size = norm(gradient)
    return gradient * (limit / size) if size > limit else gradient
