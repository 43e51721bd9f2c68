"""Runs the step on a probe, and refuses steps from which nothing could be learned."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jax_accum.doctor._case import Case, UnusableStepError, signature
from jax_accum.doctor._predict import Run, Seen
from jax_accum.doctor._probes import Probe
from jax_accum.doctor._vectors import flat

Tree = Any


class RandomStepError(UnusableStepError):
    """Two runs of one probe came to different changes.

    Attributes:
      run: the first, which nothing came before.
    """

    def __init__(self, message: str, run: Run):
        super().__init__(message)
        self.run = run


class Subject:
    """Somebody's step, called as its owner would call it.

    Args:
      case: parameters, and how to begin.
      update: `update(params, opt_state, microbatches) -> (params, opt_state[, metrics])`.
      grad: or `grad(params, microbatches) -> gradients`.

    Raises:
      TypeError: not exactly one of the two is given, or it cannot be called.
    """

    def __init__(
        self, case: Case, update: Callable[..., Any] | None, grad: Callable[..., Any] | None
    ):
        if (update is None) == (grad is None):
            raise TypeError("give exactly one of update and grad.")
        step = update if update is not None else grad
        if not callable(step):
            name = "update" if update is not None else "grad"
            raise TypeError(f"{name} must be a function, got {type(step).__name__}.")
        self.case = case
        self.step: Callable[..., Any] = step
        self.gradient_only = update is None
        self.calls = 0

    def begin(self) -> tuple[Tree, Any]:
        """Parameters and state before the first group, fresh copies."""
        params = jax.tree.map(np.array, self.case.params)
        if self.gradient_only or self.case.init is None:
            return params, None
        try:
            return params, self.case.init(jax.tree.map(np.array, self.case.params))
        except Exception as error:
            raise UnusableStepError(f"case.init raised {_said(error)}") from error

    def call(self, params: Tree, state: Any, group: list[Tree]) -> tuple[Any, ...]:
        """One group: `(params, state, …)` or `(gradients, state)`."""
        given = copy.deepcopy(group)
        before = jax.tree.map(np.array, params)
        self.calls += 1
        try:
            out = (
                self.step(params, given) if self.gradient_only else self.step(params, state, given)
            )
        except Exception as error:
            raise UnusableStepError(
                f"the step raised {_said(error)} on a group of {len(group)} microbatches of "
                f"{jax.tree.leaves(group[0])[0].shape[0]} examples; call it by hand on "
                "case.microbatch_list() to see where."
            ) from error
        if not _same(given, group):
            raise UnusableStepError(
                "the step changed the microbatches it was given (in place): work on copies, or "
                "the next reader of the data sees other examples."
            )
        if self.gradient_only:
            self._check_tree(out, "gradients")
            return out, state
        if not isinstance(out, tuple) or len(out) not in (2, 3):
            raise UnusableStepError(
                f"update returned {type(out).__name__}: return (params, opt_state), or these and "
                "metrics."
            )
        if all(isinstance(x, np.ndarray) for x in jax.tree.leaves(params)) and not _same(
            jax.tree.map(np.array, params), before
        ):
            raise UnusableStepError(
                "update changed the parameters it was given in place: return new ones (copy them "
                "when they come in)."
            )
        self._check_tree(out[0], "parameters")
        return out

    def _check_tree(self, tree: Tree, what: str) -> None:
        want, got = str(jax.tree.structure(self.case.params)), str(jax.tree.structure(tree))
        if want != got:
            raise UnusableStepError(
                f"the step returned {what} of another structure: {got} for {want}."
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            like = _at(self.case.params, path)
            if np.shape(leaf) != np.shape(like):
                raise UnusableStepError(
                    f"the step returned {what} of another shape at "
                    f"{jax.tree_util.keystr(path)!r}: {np.shape(leaf)} for {np.shape(like)}."
                )

    def observe(self, probe: Probe) -> Run:
        """Runs a probe from the initial state."""
        params, state = self.begin()
        starts, seen = [], []
        for group in probe.groups:
            before = flat(params)
            starts.append(before)
            if self.gradient_only:
                gradients, _ = self.call(params, state, group)
                seen.append(Seen(flat(gradients), {}))
                continue
            params, state, *_ = self.call(params, state, group)
            seen.append(Seen(flat(params) - before, self.visible(state)))
        return Run(probe.name, probe.groups, starts, seen, self.gradient_only, probe.examples)

    def visible(self, state: Any) -> dict[str, np.ndarray]:
        """What can be seen of the optimizer's state."""
        found: Mapping[str, Any]
        if self.case.observe is not None:
            found = self.case.observe(state)
        else:
            found = adam_moments(state)
        return {
            name: flat(tree)
            for name, tree in found.items()
            if str(jax.tree.structure(tree)) == str(jax.tree.structure(self.case.params))
        }


def adam_moments(state: Any) -> dict[str, Any]:
    """The first moment, of an Optax state that holds one."""
    import optax

    found = optax.tree.get_all_with_path(state, "mu") if state is not None else []
    return {"mu": found[0][1]} if len(found) == 1 else {}


def check_subject(subject: Subject, probe: Probe, other: Probe) -> Run:
    """The first run; refuses a step that is random, or that does not look at its microbatches.

    Raises:
      UnusableStepError: what is wrong, and what to do.
    """
    first, second = subject.observe(probe), subject.observe(probe)
    for a, b in zip(first.seen, second.seen, strict=True):
        if not np.array_equal(a.change, b.change, equal_nan=True):
            raise RandomStepError(
                "the step is not deterministic: from the same parameters, state and microbatches "
                f"it came to changes that differ by {np.max(np.abs(a.change - b.change)):.3g}. "
                "Seed it inside (a fixed jax.random.key in the state, torch.manual_seed at its "
                "beginning), make every run begin with empty gradients (Case.init), or switch "
                "dropout off.",
                first,
            )
    elsewhere = subject.observe(other)
    moved = any(a.change.any() for a in first.seen)
    if (
        moved
        and signature(probe.groups) == signature(other.groups)
        and all(
            np.array_equal(a.change, b.change, equal_nan=True)
            for a, b in zip(first.seen, elsewhere.seen, strict=True)
        )
    ):
        raise UnusableStepError(
            "the step ignores its microbatches: two groups of different examples made bit for bit "
            "the same change. Look at where the data enters it."
        )
    return first


def _same(a: Tree, b: Tree) -> bool:
    return signature(a) == signature(b) and all(
        np.array_equal(x, y, equal_nan=np.issubdtype(np.asarray(x).dtype, np.floating))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def _at(tree: Tree, path: Any) -> Any:
    return dict(jax.tree_util.tree_leaves_with_path(tree))[path]


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
