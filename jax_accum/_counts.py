"""Counters that neither wrap nor stall, and how to find them in an optimizer state.

Without 64-bit mode JAX offers int32, which wraps at 2^31, and float32, which
stalls at 2^24: a long run has more tokens than either. A counter here is two
uint32 with a carry between them. Counters go together in one array of low words and
one of high words: few buffers, and each can be updated in place.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

WORD = 2**32

SEEN = ("microbatches", "examples", "tokens")
"""What enters a group with each microbatch."""

NAMES = (*SEEN, "attempts", "updates", "skipped_nonfinite", "skipped_empty")
"""All counters, in the order of the rows of `Counts`."""


class Words(NamedTuple):
    """Counters `[n]`, or one, as their low and high words, uint32."""

    low: jax.Array
    high: jax.Array


class Counts(NamedTuple):
    """What the closed groups of a run came to.

    A row per counter, in this order: microbatches that entered a group; examples in them,
    as told by `examples=`; supervised tokens in them, as told by `weight=`; attempts (groups
    that reached their end); updates (attempts that changed the parameters); attempts skipped
    for a non-finite gradient; attempts skipped because nothing was supervised.

    Attributes:
      low: `[7]`, uint32. The counters modulo 2^32.
      high: `[7]`, uint32. The counters divided by 2^32.
    """

    low: jax.Array
    high: jax.Array


class Outcome(NamedTuple):
    """What an attempt came to; boolean scalars, exactly one of them true."""

    updated: jax.Array
    nonfinite: jax.Array
    empty: jax.Array


def zero_counts() -> Counts:
    """All counters at 0."""
    return Counts(jnp.zeros(len(NAMES), jnp.uint32), jnp.zeros(len(NAMES), jnp.uint32))


def zero_seen() -> Words:
    """Nothing seen: `[3]`."""
    return Words(jnp.zeros(len(SEEN), jnp.uint32), jnp.zeros(len(SEEN), jnp.uint32))


def as_counter(n: Any, name: str) -> Words:
    """`n` as a counter: a bool, an integer, or a number rounded to the nearest integer.

    Python and NumPy numbers are exact at any size. Negative or non-finite traced numbers
    count as 0.

    Raises:
      ValueError: `n` is not a scalar, or a concrete negative or non-finite number.
    """
    if jnp.shape(n) != ():
        raise ValueError(f"{name} must be a scalar, got shape {jnp.shape(n)}.")
    if isinstance(n, (int, float, np.integer, np.floating)):
        if not 0 <= n < math.inf:
            raise ValueError(f"{name} must be a finite number of at least 0, got {n}.")
        whole = round(n)
        return Words(jnp.uint32(whole % WORD), jnp.uint32(whole // WORD))
    n = jnp.asarray(n)
    if jnp.issubdtype(n.dtype, jnp.floating):
        # float16 cannot hold a word; division by a power of two keeps both parts exact.
        n = n.astype(jnp.promote_types(n.dtype, jnp.float32))
        n = jnp.round(jnp.where(jnp.isfinite(n) & (n > 0), n, 0))
        high = jnp.floor(n / float(WORD))
        return Words((n - high * float(WORD)).astype(jnp.uint32), high.astype(jnp.uint32))
    if n.dtype == bool:
        n = n.astype(jnp.uint32)
    n = jnp.maximum(n, 0)
    high = n >> 32 if n.dtype.itemsize == 8 else jnp.zeros_like(n)
    return Words(n.astype(jnp.uint32), high.astype(jnp.uint32))


def seen_in(microbatches: Any, examples: Any, tokens: Any) -> Words:
    """What a microbatch adds to `SEEN`, `[3]`; `None` adds nothing."""
    given = zip(SEEN, (microbatches, examples, tokens), strict=True)
    each = [as_counter(0 if n is None else n, name) for name, n in given]
    return Words(jnp.stack([n.low for n in each]), jnp.stack([n.high for n in each]))


def add(a: Words | Counts, b: Words) -> Words:
    """The sum of counters."""
    low = a.low + b.low
    return Words(low, a.high + b.high + (low < b.low).astype(jnp.uint32))


def psum(counter: Words, axis_name: Any) -> Words:
    """The sum of counters over replicas: 16 bits at a time, so that no word wraps.

    Exact for fewer than 65,536 replicas.
    """
    low, high = counter
    limbs = jnp.stack([low & 0xFFFF, low >> 16, high & 0xFFFF, high >> 16])
    limbs = jax.lax.psum(limbs, axis_name)
    carry = jnp.zeros_like(limbs[0])
    digits = []
    for limb in limbs:
        total = limb + carry
        digits.append(total & 0xFFFF)
        carry = total >> 16
    return Words(digits[0] | digits[1] << 16, digits[2] | digits[3] << 16)


def closed(before: Counts, seen: Words, came_to: Outcome, counted: Any = True) -> Counts:
    """The counters after an attempt, if it is `counted`, on a group that saw so much."""
    happened = jnp.stack([jnp.ones((), bool), *came_to]).astype(jnp.uint32)
    more = Words(
        jnp.concatenate([seen.low, happened]),
        jnp.concatenate([seen.high, jnp.zeros_like(happened)]),
    )
    return Counts(*add(before, jax.tree.map(lambda n: jnp.where(counted, n, 0), more)))


def to_ints(words: Words | Counts, local: bool = False) -> list[int]:
    """Counters as Python ints.

    With leading axes, as `pmap` and `vmap` make them, they are added up if each replica
    has its own (`local`), and otherwise must be the same on all.

    Raises:
      ValueError: they are not.
    """
    total = np.asarray(words.low).astype(object) + np.asarray(words.high).astype(object) * WORD
    total = total.reshape(-1, total.shape[-1])
    if not local and (total != total[0]).any():
        raise ValueError(
            "opt_state holds counters that differ along a leading axis. Read one at a time, as "
            "in counts(jax.tree.map(lambda x: x[0], opt_state))."
        )
    return [int(n) for n in (total.sum(axis=0) if local else total[0])]


def _counts_something(node: Any) -> bool:
    return isinstance(node, Counts) or hasattr(type(node), "pending_counts")


def _outermost(state: Any) -> list[Any]:
    """The outermost nodes of a state that count.

    Either a `Counts`, or a state whose method `pending_counts()` tells what its open
    group adds to its field `counts`.
    """
    leaves = jax.tree.leaves(state, is_leaf=_counts_something)
    return [node for node in leaves if _counts_something(node)]


def has_counts(state: Any) -> bool:
    """Whether some transform in `state` counts."""
    return bool(_outermost(state))


def outcome(before: Any, after: Any) -> Outcome:
    """What the transform made of an attempt that turned its state `before` into `after`.

    Read off its counters. A transform that keeps none always makes an update.
    """
    pairs = list(zip(_outermost(before), _outermost(after), strict=True))
    if not pairs:
        yes = jnp.ones((), bool)
        return Outcome(yes, ~yes, ~yes)

    def moved(name: str) -> jax.Array:
        row = NAMES.index(name)
        flags = [jnp.any(_total(a).low[..., row] != _total(b).low[..., row]) for a, b in pairs]
        return jnp.any(jnp.stack(flags))

    updated = moved("updates")
    nonfinite = moved("skipped_nonfinite") & ~updated
    return Outcome(updated, nonfinite, ~(updated | nonfinite))


def marks(before: Any, after: Any) -> Any:
    """`outcome` in a form that a branch can return cheaply: `()` where nothing is counted."""
    if not has_counts(before):
        return ()
    came_to = outcome(before, after)
    return jnp.stack([came_to.updated, came_to.nonfinite])


def no_marks(state: Any) -> Any:
    """What `marks` would be if nothing had been attempted."""
    return jnp.zeros(2, bool) if has_counts(state) else ()


def outcome_of(mark: Any, tried: Any) -> Outcome:
    """The outcome that `marks` tells of, where an attempt was `tried` (boolean scalar) or not."""
    tried = jnp.asarray(tried)
    updated, nonfinite = (tried, jnp.zeros((), bool)) if isinstance(mark, tuple) else mark
    return Outcome(updated, nonfinite, ~(updated | nonfinite))


def _total(node: Any) -> Counts:
    return node if isinstance(node, Counts) else node.counts


def counts(opt_state: Any) -> dict[str, int]:
    """What a run has done so far, as Python ints by name.

    Looks anywhere in the state for the counters that `MultiSteps` and `guard` keep;
    the outermost are taken. The microbatches, examples and tokens of a group that
    is still open are included. Reading them waits for the device.

    Args:
      opt_state: an optimizer state that holds the state of `MultiSteps` or `guard`.

    Returns:
      microbatches, examples, tokens, attempts, updates, skipped_nonfinite, skipped_empty.

    Raises:
      ValueError: no counters in `opt_state`, or several transforms side by side
        whose counters disagree.

    Example:
      >>> import jax.numpy as jnp, optax, jax_accum as ja
      >>> opt = ja.MultiSteps(optax.sgd(0.1), 2)
      >>> params = {"w": jnp.ones(3)}
      >>> state = opt.init(params)
      >>> for tokens in (512, 1536):
      ...     grads = {"w": jnp.ones(3)}
      ...     params, state = opt.apply(grads, state, params, weight=tokens, examples=4)
      >>> ja.counts(state)["tokens"], ja.counts(state)["examples"], ja.counts(state)["updates"]
      (2048, 8, 1)
    """
    found = []
    for node in _outermost(opt_state):
        total = to_ints(_total(node))
        pending = [0] * len(NAMES) if isinstance(node, Counts) else node.pending_counts()
        found.append(dict(zip(NAMES, map(sum, zip(total, pending, strict=True)), strict=True)))
    if not found:
        raise ValueError(
            "opt_state holds no counters. They are kept by jax_accum.MultiSteps and "
            "jax_accum.guard: wrap the optimizer in one of them."
        )
    if any(other != found[0] for other in found):
        raise ValueError(
            f"opt_state holds {len(found)} sets of counters side by side that disagree: {found}. "
            "Read the state of one transform at a time."
        )
    return found[0]
