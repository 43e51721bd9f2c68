"""Loss terms: what a loss function may return, and its weights without its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.extend.core.primitives import custom_vjp_call_p
from jax.interpreters import partial_eval

from jax_accum._weighted import Weighted

ONLY = "loss"
"""The name of the term of a loss function that returns one `Weighted`."""

Terms = dict[str, Weighted]


def as_terms(value: Any) -> Terms:
    """What a loss function returned, as terms by name.

    Raises:
      TypeError: neither a `Weighted` nor a mapping of them.
      ValueError: no term at all, or a total or weight that is not a real scalar.
    """
    terms = {ONLY: value} if isinstance(value, Weighted) else value
    if not isinstance(terms, Mapping) or not all(isinstance(t, Weighted) for t in terms.values()):
        got = f"an array of shape {jnp.shape(value)}" if hasattr(value, "shape") else repr(value)
        raise TypeError(
            f"loss_fn must return a jax_accum.Weighted or a dict of them by term name, got {got}. "
            "A bare loss does not say what it is divided by: return "
            "Weighted(sum_over_tokens, number_of_tokens), or Weighted(mean * n, n); with "
            "auxiliary output return (Weighted(...), aux) and pass has_aux=True."
        )
    if not terms:
        raise ValueError("loss_fn returned an empty dict: there is no term to differentiate.")
    for name, term in terms.items():
        for part in ("total", "weight"):
            x = getattr(term, part)
            if jnp.shape(x) != ():
                raise ValueError(
                    f"loss_fn's term {name!r} has a {part} of shape {jnp.shape(x)}, it must be a "
                    "scalar: sum over the examples of the microbatch."
                )
        if not jnp.issubdtype(jnp.result_type(term.total), jnp.floating):
            raise TypeError(
                f"loss_fn's term {name!r} has a total of dtype {jnp.result_type(term.total)}, "
                "it must be floating."
            )
        if jnp.issubdtype(jnp.result_type(term.weight), jnp.complexfloating):
            raise TypeError(f"loss_fn's term {name!r} has a complex weight, it must be real.")
    return dict(terms)


def weights_only(
    terms_fn: Callable[..., Terms], params: Any, *example: Any
) -> Callable[..., dict[str, jax.Array]]:
    """The weights that `terms_fn(params, *args)` returns, as a function of `args` alone.

    The loss function is traced once and all that does not lead to a weight is cut
    away, the model above all.

    Args:
      terms_fn: from parameters and further arguments to terms.
      params: parameters, for their shapes.
      *example: further arguments, for their shapes.

    Raises:
      ValueError: a weight depends on the parameters.
    """

    def weights(params: Any, *args: Any) -> dict[str, jax.Array]:
        terms = terms_fn(params, *args)
        return {name: _as_weight(term.weight) for name, term in terms.items()}

    closed, shapes = jax.make_jaxpr(weights, return_shape=True)(params, *example)
    whole = _without_effects(_without_custom_vjp(closed.jaxpr))
    names: Any = jax.tree.structure(shapes)
    n_params = len(jax.tree.leaves(params))
    for position, name in enumerate(sorted(shapes)):
        wanted = [i == position for i in range(names.num_leaves)]
        _, used = partial_eval.dce_jaxpr(whole, wanted)
        if any(used[:n_params]):
            raise ValueError(
                f"loss_fn's term {name!r} has a weight that depends on the parameters. A weight "
                "says what is supervised; it must follow from the batch alone (mask, labels). "
                "If it is meant as a coefficient, multiply the total by it instead. A weight that "
                "comes out of one kernel or loop together with the total counts as one that "
                "depends on them: count beside it."
            )
    keep = [i >= n_params for i in range(len(whole.invars))]
    jaxpr, _ = partial_eval.dce_jaxpr(whole, [True] * names.num_leaves, instantiate=keep)
    run = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))
    return lambda *args: jax.tree.unflatten(names, run(*jax.tree.leaves(args)))


def _without_custom_vjp(jaxpr: Jaxpr) -> Jaxpr:
    """Puts plain calls in place of `jax.custom_vjp`: a weight is not differentiated.

    JAX does not look inside the latter when it looks for what leads to a weight, so that a
    fused loss that returns sum and count would seem to make the count of the parameters.
    """

    def inside(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return value.replace(jaxpr=_without_custom_vjp(value.jaxpr))
        if isinstance(value, Jaxpr):
            return _without_custom_vjp(value)
        return tuple(map(inside, value)) if isinstance(value, tuple) else value

    eqns, changed = [], False
    for eqn in jaxpr.eqns:
        if eqn.primitive is custom_vjp_call_p:
            plain = jax.jit(jaxpr_as_fun(inside(eqn.params["call_jaxpr"])))
            (call,) = jax.make_jaxpr(plain)(*[v.aval for v in eqn.invars]).jaxpr.eqns
            eqn, changed = eqn.replace(primitive=call.primitive, params=call.params), True
        elif eqn.primitive.name in ("jit", "pjit", "checkpoint", "remat2"):
            params = {name: inside(value) for name, value in eqn.params.items()}
            if any(params[name] is not value for name, value in eqn.params.items()):
                eqn, changed = eqn.replace(params=params), True
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns) if changed else jaxpr


def _without_effects(jaxpr: Jaxpr) -> Jaxpr:
    """Leaves out what is run for its effect only (`jax.debug.print` and the like).

    It would print twice, and keep the model alive that computes what it prints.
    """

    def inside(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return value.replace(jaxpr=_without_effects(value.jaxpr))
        if isinstance(value, Jaxpr):
            return _without_effects(value)
        return tuple(map(inside, value)) if isinstance(value, tuple) else value

    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.effects and not eqn.outvars:
            continue
        if eqn.effects:
            params = {name: inside(value) for name, value in eqn.params.items()}
            changed = any(params[name] is not value for name, value in eqn.params.items())
            eqn = eqn.replace(params=params, effects=frozenset() if changed else eqn.effects)
        eqns.append(eqn)
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    return jaxpr.replace(eqns=eqns, effects=effects)


def _as_weight(weight: Any) -> jax.Array:
    """A weight as floating, NaN where it is negative or not finite: never a silent wrong number."""
    w = jnp.asarray(weight)
    floating = jnp.result_type(float) if not jnp.issubdtype(w.dtype, jnp.floating) else w.dtype
    w = w.astype(jnp.promote_types(floating, jnp.float32))
    return jnp.where((w >= 0) & jnp.isfinite(w), w, jnp.nan)
