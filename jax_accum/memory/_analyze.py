"""analyze: what a compiled step needs on each device, and what for, without running it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jax_accum.memory import _traced
from jax_accum.memory._budget import readable

Tree = Any


class Part(NamedTuple):
    """A share of the memory.

    Attributes:
      name: what it holds.
      bytes: on one device.
      estimated: whether it was inferred, and not read off the compiled program or its arguments.
    """

    name: str
    bytes: int
    estimated: bool


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What a compiled program needs, in bytes on each device.

    Attributes:
      arguments: of what it is called with.
      outputs: of what it returns.
      aliased: of outputs that take the memory of donated arguments.
      temporary: beside both, at the worst moment.
      parts: what the peak is made of; they add up to it.
      logits: what the largest cross entropy reads, if there is one.
      largest: the largest values in the program; fusion may spare some of them.
      flops: as XLA counts them, which counts the body of a loop once: of one microbatch, plus
        what runs once in an update.
      compile_seconds: tracing not included.
      platform: what it was compiled for ("cpu", "gpu", …).
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    parts: tuple[Part, ...]
    logits: _traced.Value | None
    largest: tuple[_traced.Value, ...]
    flops: float
    compile_seconds: float
    platform: str

    @property
    def peak(self) -> int:
        """Arguments + outputs - aliased + temporary, bytes."""
        return self.arguments + self.outputs - self.aliased + self.temporary

    def part(self, name: str) -> int:
        """Bytes of a part by name; 0 if there is none."""
        return sum(part.bytes for part in self.parts if part.name == name)

    def report(self) -> str:
        """The parts, largest first, with what is an estimate marked `~`."""
        lines = [f"peak {readable(self.peak)} on each device ({self.platform})"]
        for part in sorted(self.parts, key=lambda part: -part.bytes):
            if part.bytes:
                sign = "~" if part.estimated else " "
                share = part.bytes / max(self.peak, 1)
                lines.append(f"  {sign}{readable(part.bytes):>9}  {share:4.0%}  {part.name}")
        if self.logits is not None:
            lines.append(f"  logits: {self.logits} ({readable(self.logits.bytes)} each copy)")
        lines += [f"  large:  {value} ({readable(value.bytes)})" for value in self.largest[:3]]
        lines.append("  ~ estimated: how the temporary memory divides is inferred from the trace")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Analysis:
        """The inverse of `as_dict`."""

        def value(x: Any) -> _traced.Value:
            return _traced.Value(x[0], tuple(x[1]), int(x[2]), x[3])

        fields = dict(data)
        fields["parts"] = tuple(Part(*part) for part in fields["parts"])
        fields["largest"] = tuple(map(value, fields["largest"]))
        fields["logits"] = None if fields["logits"] is None else value(fields["logits"])
        return cls(**fields)


PARAMETERS, STATE, BATCH = "parameters", "optimizer state", "batch"
OTHER, RESULTS = "other arguments", "results beside the donated buffers"
ACCUMULATOR, ACTIVATIONS = "gradient accumulator", "activations of one microbatch"


def analyze(step: Any, *args: Any, **kwargs: Any) -> Analysis:
    """What a step needs at its peak, on each device, read from the compiled program.

    Nothing is run and no array is needed: `jax.ShapeDtypeStruct`s will do for arguments. The
    first three are taken to be parameters, optimizer state and batch, as `make_train_step` has it.

    The totals are exact for the backend that compiled the program (`memory_analysis`). How the
    temporary memory divides is an estimate: the accumulator is what the outermost loop carries,
    and the rest is counted as activations. Not in it: what else the process holds (other arrays,
    compiled code, an allocator's fragmentation), and what a kernel allocates for itself, as fused
    matrix products of a CPU may.

    Args:
      step: what `make_train_step` or `jax.jit` returned.
      *args: what it will be called with.
      **kwargs: the same by name.

    Raises:
      TypeError: `step` is not jitted.
      Exception: whatever tracing or compiling it raises.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_accum as ja
      >>> def loss_fn(w, x):
      ...     return ja.Weighted(jnp.sum(jnp.tanh(x @ w) ** 2), len(x))
      >>> tx = optax.sgd(0.1, momentum=0.9)
      >>> w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
      >>> x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
      >>> found = ja.memory.analyze(
      ...     ja.make_train_step(loss_fn, tx, 4), w, jax.eval_shape(tx.init, w), x)
      >>> found.part("parameters"), found.part("optimizer state"), found.part("batch")
      (16384, 16384, 8192)
      >>> found.peak == sum(part.bytes for part in found.parts)
      True
    """
    return compile_and_read(lower(step, *args, **kwargs))


class Lowered(NamedTuple):
    """A program that is traced and lowered, not compiled."""

    lowered: Any
    jaxpr: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def lower(step: Any, *args: Any, **kwargs: Any) -> Lowered:
    """Traces and lowers a jitted step.

    Raises:
      TypeError: it is not jitted.
    """
    if not callable(getattr(step, "lower", None)):
        raise TypeError(
            f"step must be jitted (what make_train_step or jax.jit returns), got {step!r}: its "
            "memory is that of a compiled program."
        )
    trace = getattr(step, "trace", None)
    jaxpr = trace(*args, **kwargs).jaxpr if callable(trace) else None
    return Lowered(step.lower(*args, **kwargs), jaxpr, args, kwargs)


def compile_and_read(program: Lowered) -> Analysis:
    """Compiles a lowered program and reads what it needs."""
    began = time.perf_counter()
    compiled = program.lowered.compile()
    seconds = time.perf_counter() - began
    memory = compiled.memory_analysis()
    if memory is None:
        raise ValueError("step was compiled for a backend that does not analyse memory.")
    cost = compiled.cost_analysis() or {}
    cost = cost[0] if isinstance(cost, list) else cost
    totals = {
        "arguments": int(memory.argument_size_in_bytes),
        "outputs": int(memory.output_size_in_bytes),
        "aliased": int(memory.alias_size_in_bytes),
        "temporary": int(memory.temp_size_in_bytes),
    }
    carried = 0 if program.jaxpr is None else _traced.carried_bytes(program.jaxpr)
    return Analysis(
        **totals,
        parts=_parts(totals, _sizes(compiled, program.args), carried),
        logits=None if program.jaxpr is None else _traced.find_logits(program.jaxpr),
        largest=() if program.jaxpr is None else _traced.largest_values(program.jaxpr),
        flops=float(cost.get("flops", 0.0)),
        compile_seconds=seconds,
        platform=jax.default_backend(),
    )


def _parts(totals: Mapping[str, int], sizes: list[int], carried: int) -> tuple[Part, ...]:
    left = totals["arguments"]
    parts = []
    for name, size in zip((PARAMETERS, STATE, BATCH), sizes, strict=False):
        # What a program does not use is not among its arguments.
        size = min(size, left)
        left -= size
        parts.append(Part(name, size, False))
    accumulator = min(carried, totals["temporary"])
    return (
        *parts,
        Part(OTHER, left, False),
        Part(RESULTS, totals["outputs"] - totals["aliased"], False),
        Part(ACCUMULATOR, accumulator, True),
        Part(ACTIVATIONS, totals["temporary"] - accumulator, True),
    )


def _sizes(compiled: Any, args: tuple[Any, ...]) -> list[int]:
    """Bytes on one device of each of the first three arguments."""
    shardings = compiled.input_shardings[0]

    def one(x: Any, sharding: Any) -> int:
        if not hasattr(x, "shape"):
            x = jax.eval_shape(jax.numpy.asarray, x)
        if sharding is None:
            return _traced.bytes_of(x)
        shard = jax.ShapeDtypeStruct(sharding.shard_shape(tuple(x.shape)), x.dtype)
        return _traced.bytes_of(shard)

    found = []
    for i, tree in enumerate(args[:3]):
        leaves = jax.tree.leaves(tree)
        places = jax.tree.leaves(shardings[i], is_leaf=lambda s: s is None)
        if len(places) != len(leaves):
            places = [getattr(leaf, "sharding", None) for leaf in leaves]
        found.append(sum(map(one, leaves, places)))
    return found
