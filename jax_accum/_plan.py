"""BatchPlan: m, A and D, and what they multiply to."""

from __future__ import annotations

import dataclasses

from jax_accum._checks import checked_int


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How the examples of one update are cut.

    Attributes:
      microbatch_size: m, examples that one replica passes through one forward and backward.
      microbatches: A, microbatches of one update on each replica.
      replicas: D, data replicas. Devices that share one copy of the model are one.

    Raises:
      TypeError: a size is not an integer.
      ValueError: a size below 1.

    Example:
      >>> import jax_accum as ja
      >>> plan = ja.BatchPlan(microbatch_size=2, microbatches=8, replicas=2)
      >>> plan.examples_per_update, plan.examples_per_replica
      (32, 16)
      >>> plan.with_microbatch_size(8).microbatches
      2
    """

    microbatch_size: int
    microbatches: int
    replicas: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = checked_int(getattr(self, field.name), field.name)
            object.__setattr__(self, field.name, value)

    @property
    def examples_per_replica(self) -> int:
        """M * A: examples of one update that pass through one replica."""
        return self.microbatch_size * self.microbatches

    @property
    def examples_per_update(self) -> int:
        """M * A * D."""
        return self.examples_per_replica * self.replicas

    def with_microbatch_size(self, microbatch_size: int) -> BatchPlan:
        """The plan with another m, and A such that the examples per update stay.

        Raises:
          ValueError: m does not divide the examples per replica; the message lists those
            that do.
        """
        m = checked_int(microbatch_size, "microbatch_size")
        n = self.examples_per_replica
        if n % m:
            divisors = [d for d in range(1, n + 1) if n % d == 0]
            raise ValueError(
                f"microbatch_size={m} does not divide the {n} examples per replica, so the "
                f"examples per update could not stay {self.examples_per_update}. Divisors: "
                f"{', '.join(map(str, divisors))}."
            )
        return dataclasses.replace(self, microbatch_size=m, microbatches=n // m)

    def describe(self) -> str:
        """The arithmetic in one line."""
        return (
            f"{self.microbatch_size} examples x {self.microbatches} microbatches x "
            f"{self.replicas} replicas = {self.examples_per_update} examples per update"
        )
