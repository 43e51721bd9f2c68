"""Checks of arguments that several transforms share."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_accum._weighted import Weighted


def checked_int(value: Any, name: str) -> int:
    """`value` as a Python int of at least 1."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer of at least 1, got {value!r}.")
    try:
        n = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be an integer of at least 1, got {value!r} ({type(value).__name__})."
        ) from None
    if n < 1:
        raise ValueError(f"{name} must be at least 1, got {n}.")
    return n


def checked_schedule(k: Any) -> tuple[int | None, Callable[[jax.Array], Any]]:
    """Microbatches per group as `(constant or None, function of the update count)`."""
    if callable(k) and not hasattr(k, "dtype"):
        return None, k
    try:
        constant = checked_int(k, "every_k_schedule")
    except TypeError as error:
        raise TypeError(f"{error} A function of the number of updates will do as well.") from None
    return constant, lambda gradient_step: constant


def as_k(value: Any) -> jax.Array:
    """What a schedule returned, as an int32 scalar; a fraction is rounded up.

    A traced value below 1 cannot raise: it counts as 1.
    """
    dtype, shape = jnp.result_type(value), jnp.shape(value)
    real = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
    if shape != () or not real:
        raise TypeError(
            f"every_k_schedule must return an integer scalar, got shape {shape}, dtype {dtype}."
        )
    if not isinstance(value, jax.core.Tracer) and not 1 <= np.asarray(value) < np.inf:
        raise ValueError(f"every_k_schedule returned {value}: a group needs at least 1 microbatch.")
    if jnp.issubdtype(dtype, jnp.floating):
        value = jnp.ceil(value)
    return jnp.maximum(jnp.asarray(value, jnp.int32), 1)


def check_weight(weight: Any) -> jax.Array:
    """A weight as a floating scalar, at least float32.

    A concrete negative or non-finite weight raises. A traced one cannot: it becomes
    NaN, so that the gradient of its group is NaN, and a guard skips it.
    """
    if isinstance(weight, Weighted):
        raise TypeError(
            "weight must be a scalar, got a Weighted: pass its weight, weight=x.weight."
        )
    dtype, shape = jnp.result_type(weight), jnp.shape(weight)
    if shape != ():
        raise ValueError(
            f"weight must be a scalar, the supervised tokens of this microbatch; got shape {shape}."
        )
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"weight must be a real number, got dtype {dtype}.")
    floating = jnp.promote_types(dtype, jnp.float32)
    if not jnp.issubdtype(dtype, jnp.floating):
        floating = jnp.result_type(float)
    if isinstance(weight, jax.core.Tracer):
        w = weight.astype(floating)
        return jnp.where((w >= 0) & jnp.isfinite(w), w, jnp.nan)
    if not 0 <= np.asarray(weight) <= jnp.finfo(floating).max:
        raise ValueError(f"weight must be finite and at least 0, got {weight}.")
    return jnp.asarray(float(weight) if isinstance(weight, int) else weight, floating)


def as_transformation(inner: Any, name: str) -> optax.GradientTransformationExtraArgs:
    """An optimizer as a transformation that takes extra arguments, and keeps none from `inner`.

    An object such as `MultiSteps` is not one itself, but makes one.
    """
    if hasattr(inner, "gradient_transformation"):
        inner = inner.gradient_transformation()
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise TypeError(
            f"{name} must be an Optax gradient transformation, such as optax.adamw(1e-3), "
            f"got {inner!r}. Of an optimizer of Flax NNX it is optimizer.tx."
        )
    return optax.with_extra_args_support(inner)


def check_flag(flag: Any, name: str) -> bool | jax.Array:
    """A Python bool, or a boolean scalar array."""
    if isinstance(flag, (bool, np.bool_)):
        return bool(flag)
    if not hasattr(flag, "dtype") or flag.dtype != bool or flag.shape != ():
        got = f"{flag!r}" if not hasattr(flag, "dtype") else f"shape {flag.shape}, {flag.dtype}"
        raise TypeError(f"{name} must be a bool or a boolean scalar array, got {got}.")
    return jnp.asarray(flag)
