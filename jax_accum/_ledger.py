"""Ledger: the one place that knows what a run has done, and logs it by its axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jax_accum._counts import counts
from jax_accum._group import Dropped, Group
from jax_accum.writers import Writer

AXES = ("updates", "examples", "tokens")
"""What a logged value is plotted against."""


@dataclasses.dataclass
class Totals:
    """What a run came to so far. All are of all replicas.

    Attributes:
      microbatches: of all replicas, each to its last with a weight, as `counts` has them.
      attempts: groups that reached their end.
      updates: attempts that changed the parameters.
      skipped_nonfinite: attempts skipped for a gradient that is not finite.
      skipped_empty: attempts skipped because nothing was supervised.
      examples: in all attempts.
      tokens: supervised, in all attempts.
      tokens_ignored: entries of their examples that were not supervised.
      examples_padding: rows that were copies and weighed nothing.
      examples_dropped: left out at the end of an epoch.
    """

    microbatches: int = 0
    attempts: int = 0
    updates: int = 0
    skipped_nonfinite: int = 0
    skipped_empty: int = 0
    examples: int = 0
    tokens: int | float = 0
    tokens_ignored: int | float = 0
    examples_padding: int = 0
    examples_dropped: int = 0


class Ledger:
    """Adds up what groups came to, and logs values with the axes they belong to.

    What is logged since the last time is one value for all groups since then: the loss is
    the sum of their losses over the sum of their weights, per term, never a mean of means.
    A skipped attempt does not enter it.

    Args:
      writers: where `log` writes; see `jax_accum.writers`.
      coefficients: those of the loss, by term.

    Example:
      >>> import numpy as np, optax, jax.numpy as jnp, jax_accum as ja
      >>> def loss_fn(w, batch):
      ...     error = jnp.where(batch["mask"], w - batch["x"], 0)
      ...     return ja.Weighted(jnp.sum(error**2), jnp.sum(batch["mask"]))
      >>> plan = ja.BatchPlan(microbatch_size=2, microbatches=1)
      >>> tx = ja.guard(optax.sgd(0.5))
      >>> step = ja.make_train_step(loss_fn, tx, None)
      >>> w = jnp.zeros(())
      >>> opt_state = tx.init(w)
      >>> ledger = ja.Ledger([ja.writers.Console()])
      >>> stream = [{"x": np.array([1.0, 3.0, 4.0], np.float32)}]
      >>> for group in ja.groups(stream, plan):
      ...     w, opt_state, metrics = step(w, opt_state, group.batch, examples=group.examples)
      ...     ledger.attempt(group, metrics)
      >>> _ = ledger.log()  # (1 + 9 + 4) / (2 + 1)
      updates 2  examples 3  tokens 3  loss 4.66667  grad_norm 4
      >>> ledger.check(opt_state)
    """

    def __init__(
        self, writers: Sequence[Writer] = (), *, coefficients: Mapping[str, float] | None = None
    ) -> None:
        self.writers = list(writers)
        self._coefficients = dict(coefficients or {})
        self._waiting: list[tuple[dict[str, Any], Mapping[str, Any]]] = []
        self._totals = Totals()
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._grad_norm: float | None = None

    def attempt(self, group: Group, metrics: Mapping[str, Any]) -> None:
        """Takes note of an attempt; does not wait for the device.

        Args:
          group: what was trained.
          metrics: what `make_train_step` returned: `terms` and `weights` by name, `updated`,
            and `grad_norm`, which is that after normalising and before clipping.

        Raises:
          ValueError: one of these is missing.
        """
        needed = ("terms", "weights", "updated", "grad_norm")
        if missing := [name for name in needed if name not in metrics]:
            raise ValueError(f"metrics lacks {missing}: pass what make_train_step returned.")
        facts = {
            "microbatches": group.microbatches,
            "examples": group.examples,
            "tokens": group.tokens,
            "tokens_ignored": group.ignored,
            "examples_padding": group.padding,
        }
        self._waiting.append((facts, {name: metrics[name] for name in needed}))

    def drop(self, dropped: Dropped) -> None:
        """Takes note of examples that were left out: `groups(...).dropped`, once per epoch."""
        self._totals.examples_dropped += dropped.examples

    @property
    def totals(self) -> Totals:
        """What the run came to; waits for the device."""
        self._settle()
        return dataclasses.replace(self._totals)

    @property
    def examples(self) -> int:
        """Examples in all attempts; does not wait for the device."""
        return self._totals.examples + sum(facts["examples"] for facts, _ in self._waiting)

    @property
    def axes(self) -> dict[str, int | float]:
        """Where the run stands, by axis: updates, examples, tokens. Waits for the device."""
        totals = self.totals
        return {axis: getattr(totals, axis) for axis in AXES}

    def log(self, **extra: float) -> dict[str, float]:
        """Writes the loss since the last call, the last gradient norm, and `extra`.

        The loss is left out if no attempt since then was an update.

        Returns:
          What was written.
        """
        axes = self.axes
        metrics: dict[str, float] = {}
        terms = {t: self._sums[t] / w for t, w in self._weights.items() if w}
        if terms:
            metrics["loss"] = sum(self._coefficients.get(t, 1.0) * x for t, x in terms.items())
        if len(self._weights) > 1:
            metrics |= {f"loss/{name}": value for name, value in terms.items()}
        if self._grad_norm is not None:
            metrics["grad_norm"] = self._grad_norm
        metrics |= extra
        for writer in self.writers:
            writer.log(metrics, axes)
        self._sums, self._weights, self._grad_norm = {}, {}, None
        return metrics

    def check(self, opt_state: Any) -> None:
        """Holds the ledger against the counters in the optimizer state.

        Raises:
          ValueError: they disagree; the message names the counters.
        """
        ours = dataclasses.asdict(self.totals)
        theirs = counts(opt_state)
        wrong = [f"{k}: {ours[k]} and {n}" for k, n in theirs.items() if round(ours[k]) != n]
        if wrong:
            raise ValueError(
                f"the ledger and the optimizer's counters disagree: {'; '.join(wrong)}. Usual "
                "causes: examples= not passed to the training step, weight= of groups that counts "
                "otherwise than the loss, padding= of groups that marks rows in a leaf that the "
                "loss does not read, a restart that restored one of the two."
            )

    def state(self) -> dict[str, Any]:
        """All that `restore` needs, as JSON would hold it; for a checkpoint."""
        totals = dataclasses.asdict(self.totals)
        since = {"sums": self._sums, "weights": self._weights, "grad_norm": self._grad_norm}
        return {"totals": totals, "since_log": since}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned.

        Raises:
          ValueError: it is something else.
        """
        try:
            self._totals = Totals(**state["totals"])
            since = state["since_log"]
            self._sums, self._weights = dict(since["sums"]), dict(since["weights"])
            self._grad_norm = since["grad_norm"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"state is not that of a Ledger: {error!r}.") from error
        self._waiting = []

    def _settle(self) -> None:
        waiting, self._waiting = self._waiting, []
        values = jax.device_get([metrics for _, metrics in waiting])
        for (facts, _), metrics in zip(waiting, values, strict=True):
            totals = self._totals
            for name, n in facts.items():
                setattr(totals, name, getattr(totals, name) + n)
            totals.attempts += 1
            weights = {name: float(w) for name, w in metrics["weights"].items()}
            if not any(weights.values()):
                totals.skipped_empty += 1
            elif not metrics["updated"]:
                totals.skipped_nonfinite += 1
            else:
                totals.updates += 1
                for name, w in weights.items():
                    if w:  # what a term without weight summed up means nothing
                        total = float(metrics["terms"][name])
                        self._sums[name] = self._sums.get(name, 0.0) + total
                        self._weights[name] = self._weights.get(name, 0.0) + w
            if metrics["grad_norm"] is not None and metrics["updated"]:
                self._grad_norm = float(metrics["grad_norm"])
