"""What a traced program shows of its memory: loop carries, large values, logits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_accum._weighted as home

_LOOPS = ("while", "scan")
_OWN = os.path.dirname(os.path.abspath(home.__file__))
_JAX = os.path.dirname(os.path.abspath(jax.__file__))


class Value(NamedTuple):
    """A value that the program computes.

    Attributes:
      dtype: its type.
      shape: its shape; inside a `shard_map`, on one device.
      bytes: its size.
      where: the operation, and the line of the caller's code that it comes from.
    """

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    where: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}] {self.where}"


def bytes_of(x: Any) -> int:
    """Bytes of an array, of a shape with a dtype, or of random keys."""
    shape, dtype = tuple(x.shape), x.dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        shape, dtype = data.shape, data.dtype
    n = 1
    for size in shape:
        n *= size
    return int(n * jnp.dtype(dtype).itemsize)


def carried_bytes(jaxpr: Any) -> int:
    """Bytes that the outermost loop with the largest carry hands on from turn to turn.

    In a step that accumulates, the gradient accumulators are nearly all of it. 0 without a loop.
    """
    most = 0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = equation.primitive.name
        if name == "while":
            carry = equation.params["body_jaxpr"].out_avals
        elif name == "scan":
            # What is stacked has an axis more outside than in the body; what is carried has not.
            pairs = zip(equation.params["jaxpr"].out_avals, equation.outvars, strict=True)
            carry = [inside for inside, out in pairs if inside.shape == out.aval.shape]
        else:
            most = max([most, *(carried_bytes(inner) for inner in _inner(equation))])
            continue
        most = max(most, sum(map(bytes_of, carry)))
    return most


def largest_values(jaxpr: Any, count: int = 5) -> tuple[Value, ...]:
    """The largest values that are computed, no two of one shape and line.

    A compiler may fuse some of them away: they are candidates, not measurements.
    """
    found: dict[Value, None] = {}
    for equation in _equations(jaxpr):
        if equation.primitive.name in (*_LOOPS, "pjit", "jit", "shard_map") or _inner(equation):
            continue
        for out in equation.outvars:
            if hasattr(out.aval, "shape") and hasattr(out.aval, "dtype"):
                found[_value(out.aval, equation)] = None
    by_size = sorted(found, key=lambda value: -value.bytes)
    unique: dict[tuple[str, tuple[int, ...]], Value] = {}
    for value in by_size:
        unique.setdefault((value.dtype, value.shape), value)
        if len(unique) == count:
            break
    return tuple(unique.values())


def find_logits(jaxpr: Any) -> Value | None:
    """The largest operand of a log-sum-exp: what a cross entropy reads, `[..., V]`.

    Recognised by its arithmetic: the logarithm of a sum of exponentials. A softmax has no
    logarithm.
    """
    found: list[Value] = []
    for part in _jaxprs(jaxpr):
        makers = {out: equation for equation in part.eqns for out in equation.outvars}
        for equation in part.eqns:
            if equation.primitive.name == "log":
                total = _maker(makers, equation, passing=_SAME_NUMBERS)
                exps = None if total is None else _maker(makers, total)
                if total is None or total.primitive.name != "reduce_sum" or exps is None:
                    continue
                if exps.primitive.name == "exp" and exps.outvars[0].aval.ndim > 1:
                    found.append(_value(exps.outvars[0].aval, equation))
    return max(found, key=lambda value: value.bytes, default=None)


_SAME_NUMBERS = ("abs", "broadcast_in_dim", "convert_element_type", "reshape", "squeeze")


def _maker(makers: dict[Any, Any], equation: Any, passing: tuple[str, ...] = ()) -> Any:
    """The operation that made the operand of another, looked for past those named."""
    while True:
        operand = equation.invars[0]
        equation = None if hasattr(operand, "val") else makers.get(operand)
        if equation is None or equation.primitive.name not in passing:
            return equation


def _inner(equation: Any) -> list[Any]:
    """The programs inside an operation."""
    found = []
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                found.append(part)
    return found


def _jaxprs(jaxpr: Any) -> Iterator[Any]:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    yield jaxpr
    for equation in jaxpr.eqns:
        for part in _inner(equation):
            yield from _jaxprs(part)


def _equations(jaxpr: Any) -> Iterator[Any]:
    for part in _jaxprs(jaxpr):
        yield from part.eqns


def _value(aval: Any, equation: Any) -> Value:
    where = equation.primitive.name
    line = _line(equation)
    dtype = str(aval.dtype)
    return Value(dtype, tuple(aval.shape), bytes_of(aval), f"{where} at {line}" if line else where)


def _line(equation: Any) -> str:
    """File and line in the caller's code, or an empty string where the trace does not say."""
    traceback = getattr(equation.source_info, "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        file = os.path.abspath(frame.file_name)
        own = file.startswith(_OWN + os.sep) and os.sep + "crosscheck" + os.sep not in file
        if own or file.startswith(_JAX + os.sep) or f"{os.sep}flax{os.sep}" in file:
            continue
        return f"{os.path.basename(file)}:{frame.line_num}"
    return ""
