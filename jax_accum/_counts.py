"""Counters that neither wrap nor stall, and how to find them in an optimizer state.

Without 64-bit mode JAX offers int32, which wraps at 2^31, and float32, which
stalls at 2^24: a long run has more tokens than either. A counter here is two
uint32, low word first, with a carry. The counters of a transform are one array,
so that they cost one buffer and not seven.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

WORD = 2**32

SEEN = ("microbatches", "examples", "tokens")
"""What enters a group with each microbatch."""

NAMES = (*SEEN, "attempts", "updates", "skipped_nonfinite", "skipped_empty")
"""All counters, in the order of the rows of `Counts`."""


class Counts(NamedTuple):
    """What the closed groups of a run came to.

    Attributes:
      words: `[7, 2]`, uint32. A row per counter, low word first, in this order:
        microbatches that entered a group; examples in them, as told by `examples=`;
        supervised tokens in them, as told by `weight=`; attempts (groups that reached
        their end); updates (attempts that changed the parameters); attempts skipped
        for a non-finite gradient; attempts skipped because nothing was supervised.
    """

    words: jax.Array


class Outcome(NamedTuple):
    """What an attempt came to; boolean scalars, exactly one of them true."""

    updated: jax.Array
    nonfinite: jax.Array
    empty: jax.Array


def zero_counts() -> Counts:
    """All counters at 0."""
    return Counts(jnp.zeros((len(NAMES), 2), jnp.uint32))


def zero_seen() -> jax.Array:
    """Nothing seen: `[3, 2]`, uint32."""
    return jnp.zeros((len(SEEN), 2), jnp.uint32)


def as_counter(n: Any) -> jax.Array:
    """`n` as a counter, `[2]`: a bool, an integer, or a number rounded to the nearest integer.

    Python and NumPy numbers are exact at any size. Negative or non-finite traced numbers
    count as 0.
    """
    if isinstance(n, (int, float, np.integer, np.floating)):
        exact = max(round(n), 0)
        return jnp.array([exact % WORD, exact // WORD], jnp.uint32)
    n = jnp.asarray(n)
    if jnp.issubdtype(n.dtype, jnp.floating):
        # float16 cannot hold a word; division by a power of two keeps both parts exact.
        whole = n.astype(jnp.promote_types(n.dtype, jnp.float32))
        whole = jnp.round(jnp.where(jnp.isfinite(whole) & (whole > 0), whole, 0))
        high = jnp.floor(whole / float(WORD))
        return jnp.stack([whole - high * float(WORD), high]).astype(jnp.uint32)
    if n.dtype == bool:
        n = n.astype(jnp.uint32)
    n = jnp.maximum(n, 0)
    high = n >> 32 if n.dtype.itemsize == 8 else jnp.zeros_like(n)
    return jnp.stack([n.astype(jnp.uint32), high.astype(jnp.uint32)])


def seen_in(microbatches: Any, examples: Any, tokens: Any) -> jax.Array:
    """What a microbatch adds to `SEEN`: `[3, 2]`; `None` adds nothing."""
    return jnp.stack([as_counter(0 if n is None else n) for n in (microbatches, examples, tokens)])


def add(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum of counters, `[..., 2]`."""
    low = a[..., 0] + b[..., 0]
    carry = (low < a[..., 0]).astype(jnp.uint32)
    return jnp.stack([low, a[..., 1] + b[..., 1] + carry], axis=-1)


def psum(counter: jax.Array, axis_name: Any) -> jax.Array:
    """The sum of counters over replicas: 16 bits at a time, so that no word wraps.

    Exact for fewer than 65,536 replicas.
    """
    low, high = counter[..., 0], counter[..., 1]
    limbs = jnp.stack([low & 0xFFFF, low >> 16, high & 0xFFFF, high >> 16])
    limbs = jax.lax.psum(limbs, axis_name)
    carry = jnp.zeros_like(limbs[0])
    digits = []
    for limb in limbs:
        total = limb + carry
        digits.append(total & 0xFFFF)
        carry = total >> 16
    return jnp.stack([digits[0] | digits[1] << 16, digits[2] | digits[3] << 16], axis=-1)


def closed(before: Counts, seen: jax.Array, came_to: Outcome) -> Counts:
    """The counters after an attempt on a group that saw so much."""
    happened = jnp.stack([jnp.ones((), bool), *came_to]).astype(jnp.uint32)
    happened = jnp.stack([happened, jnp.zeros_like(happened)], axis=-1)
    return Counts(add(before.words, jnp.concatenate([seen, happened])))


def to_ints(words: Any) -> list[int]:
    """Counters `[..., n, 2]` as n Python ints; stacked over replicas, they are added up."""
    words = np.asarray(words).astype(object)
    words = words.reshape(-1, *words.shape[-2:]).sum(axis=0)
    return [int(low + high * WORD) for low, high in words]


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
        flags = [jnp.any(_words(a)[..., row, :] != _words(b)[..., row, :]) for a, b in pairs]
        return jnp.any(jnp.stack(flags))

    updated = moved("updates")
    nonfinite = moved("skipped_nonfinite") & ~updated
    return Outcome(updated, nonfinite, ~(updated | nonfinite))


def _words(node: Any) -> Any:
    return node.words if isinstance(node, Counts) else node.counts.words


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
        total = to_ints(_words(node))
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
