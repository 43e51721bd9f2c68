"""Weighted: a loss term as a sum and the weight it is to be divided by."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Weighted(NamedTuple):
    """The value of one loss term over some examples: a sum, and what divides it.

    Keeping the two apart until a whole group has been seen is what makes a
    result independent of how the group was cut: sums and weights add, means
    do not.

    Attributes:
      total: scalar, floating. The sum of the term over the examples.
      weight: scalar, any real dtype, at least 0. What the sum is divided by:
        supervised tokens, sequences, microbatches. It must not depend on the
        parameters. A weight of 0 says that the term has nothing to say here.

    Example:
      >>> import jax_accum as ja
      >>> a, b = ja.Weighted(1024.0, 512), ja.Weighted(6144.0, 1536)
      >>> float(a.mean), float(b.mean)
      (2.0, 4.0)
      >>> float((a + b).mean)  # and not 3.0, the mean of the means
      3.5
    """

    total: jax.typing.ArrayLike
    weight: jax.typing.ArrayLike

    @property
    def mean(self) -> jax.Array:
        """`total / weight`; 0, with a gradient of 0, where the weight is 0."""
        some = jnp.asarray(self.weight) > 0
        return jnp.where(some, self.total, 0) / jnp.where(some, self.weight, 1)

    # Adding two values of a term means adding sums and weights, never joining tuples.
    def __add__(self, other: object) -> Weighted:
        if not isinstance(other, Weighted):
            return NotImplemented
        return Weighted(self.total + other.total, self.weight + other.weight)
