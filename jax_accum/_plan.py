"""BatchPlan: m, A and D, and what they multiply to."""

from __future__ import annotations

import dataclasses

from jax.sharding import AbstractMesh, Mesh

from jax_accum._checks import checked_int
from jax_accum._layout import data_replicas


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

    @classmethod
    def from_mesh(
        cls,
        mesh: Mesh | AbstractMesh,
        *,
        microbatch_size: int,
        microbatches: int,
        data_axes: str | tuple[str, ...] = ("data",),
    ) -> BatchPlan:
        """The plan for a mesh, of which the data axes alone count.

        Raises:
          ValueError: the mesh lacks one of `data_axes`.

        Example:
          >>> import jax, jax_accum as ja
          >>> mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))  # 8 devices
          >>> ja.BatchPlan.from_mesh(mesh, microbatch_size=2, microbatches=8).examples_per_update
          64
        """
        replicas = data_replicas(mesh, data_axes)
        return cls(microbatch_size=microbatch_size, microbatches=microbatches, replicas=replicas)

    @classmethod
    def from_global_batch(
        cls, examples_per_update: int, *, microbatch_size: int, replicas: int = 1
    ) -> BatchPlan:
        """The plan that trains so many examples per update, m at a time.

        Raises:
          ValueError: m and D do not divide the examples; the message lists the sizes that do.

        Example:
          >>> import jax_accum as ja
          >>> ja.BatchPlan.from_global_batch(64, microbatch_size=2, replicas=4).microbatches
          8
        """
        n = checked_int(examples_per_update, "examples_per_update")
        m = checked_int(microbatch_size, "microbatch_size")
        d = checked_int(replicas, "replicas")
        if n % d:
            raise ValueError(
                f"examples_per_update={n} cannot be shared evenly by {d} replicas. Choose a "
                f"multiple of {d}: {n - n % d or d} or {n - n % d + d} are the nearest."
            )
        if n // d % m:
            raise ValueError(
                f"microbatch_size={m} does not divide the {n // d} examples per replica of "
                f"examples_per_update={n}. Sizes that do: {_listed(_divisors(n // d))}."
            )
        return cls(microbatch_size=m, microbatches=n // d // m, replicas=d)

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
            raise ValueError(
                f"microbatch_size={m} does not divide the {n} examples per replica, so the "
                f"examples per update could not stay {self.examples_per_update}. Divisors: "
                f"{_listed(_divisors(n))}."
            )
        return dataclasses.replace(self, microbatch_size=m, microbatches=n // m)

    def describe(self) -> str:
        """The arithmetic, as one would check it by hand.

        Example:
          >>> import jax_accum as ja
          >>> print(ja.BatchPlan(microbatch_size=2, microbatches=8, replicas=2).describe())
          microbatch size m       2  examples in one forward and backward of a replica
          microbatches    A    ×  8  on each replica for one update
                               = 16  examples per replica
          replicas        D    ×  2  data replicas
                               = 32  examples per update
        """
        rows = [
            ("microbatch size m", " ", self.microbatch_size, _IN_ONE_PASS),
            ("microbatches    A", "×", self.microbatches, "on each replica for one update"),
            ("", "=", self.examples_per_replica, "examples per replica"),
            ("replicas        D", "×", self.replicas, "data replicas"),
            ("", "=", self.examples_per_update, "examples per update"),
        ]
        width = len(str(self.examples_per_update))
        return "\n".join(
            f"{label:<17}    {sign} {number:>{width}}  {words}"
            for label, sign, number, words in rows
        )


_IN_ONE_PASS = "examples in one forward and backward of a replica"


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
