"""The accumulator of a group: its dtype, its sum, its mean, and what may be added to it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def floor_dtype(dtype: Any) -> jnp.dtype:
    """The narrowest accumulator allowed: float32, or `dtype` if that is wider."""
    dtype = jnp.float32 if dtype is None else dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            f"accumulator_dtype must be a floating or complex dtype, got {jnp.dtype(dtype)}."
        )
    return jnp.promote_types(jax.dtypes.canonicalize_dtype(dtype), jnp.float32)


def zeros_like(tree: Tree, dtype: Any = None, floor: Any = None) -> Tree:
    """Zeros of the shape and sharding of each leaf, under `jit` as well.

    Args:
      tree: arrays.
      dtype: of the zeros; each leaf's own if not given.
      floor: widens the dtype of each leaf to at least this one.
    """

    def zeros(x: Any) -> jax.Array:
        to = dtype if dtype is not None else jnp.result_type(x)
        to = to if floor is None else jnp.promote_types(to, floor)
        # A select on the leaf rather than a new constant: sharding propagates
        # through it, then the compiler removes it.
        return jnp.where(False, x, 0).astype(to)

    return jax.tree.map(zeros, tree)


def own_buffers(tree: Tree, *others: Tree) -> Tree:
    """`tree`, with a copy of each array that stands in it twice, or in `others` as well.

    A state may be donated together with the parameters, and no buffer can be donated twice.
    """
    taken = {id(x) for x in jax.tree.leaves(others)}

    def own(x: Any) -> Any:
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            return x
        if id(x) in taken:
            x = jnp.copy(x)
        taken.add(id(x))
        return x

    return jax.tree.map(own, tree)


def require_arrays(tree: Tree, name: str) -> None:
    """Raises a `TypeError` if a leaf of `tree` cannot hold a gradient."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (int, float, complex)):
            raise TypeError(
                f"{name}{jax.tree_util.keystr(path)} is a {type(leaf).__name__}, not an array. "
                "Filter the tree first, e.g. equinox.filter(model, equinox.is_inexact_array), "
                "or leave the leaf out with None."
            )


def require_gradients(grads: Tree, like: Tree, like_name: str, what: str = "updates") -> None:
    """Raises unless `grads` has the structure and shapes of `like`, and inexact dtypes."""
    got: Any = jax.tree.structure(grads)
    want_tree: Any = jax.tree.structure(like)
    if got != want_tree:
        raise ValueError(
            f"{what} must have the tree structure of {like_name}. Got {got}, want {want_tree}. "
            "Was the state made by init for other parameters?"
        )
    wanted = jax.tree.leaves(like)
    for (path, grad), want in zip(jax.tree_util.tree_leaves_with_path(grads), wanted, strict=True):
        where = f"{what}{jax.tree_util.keystr(path)}"
        dtype = jnp.result_type(grad) if not hasattr(grad, "dtype") else grad.dtype
        if dtype == jax.dtypes.float0 or not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"{where} has dtype {dtype}: what is differentiated must be floating or complex. "
                "Differentiate with respect to floating parameters only, and leave the others "
                "out: equinox.partition(model, equinox.is_inexact_array), nnx.split(model, "
                "nnx.Param, ...), state.params of a TrainState; or None, or optax.masked."
            )
        if jnp.shape(grad) != jnp.shape(want):
            raise ValueError(
                f"{where} has shape {jnp.shape(grad)}, but {like_name} has {jnp.shape(want)} there."
            )


def require_reduced(grads: Tree) -> None:
    """Raises a `ValueError` if a gradient is unreduced over an axis of an explicit mesh."""
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        spec = getattr(getattr(jax.typeof(grad), "sharding", None), "spec", None)
        if unreduced := sorted(getattr(spec, "unreduced", None) or (), key=str):
            raise ValueError(
                f"updates{jax.tree_util.keystr(path)} is unreduced over {unreduced}, which a "
                "weight cannot multiply. Reduce it first, by jax.reshard(updates, spec), in every "
                "call; or use jax.shard_map and axis_name, which reduces once per group."
            )


def require_width(grads: Tree, acc: Tree) -> None:
    """Raises a `TypeError` if a gradient is wider than its accumulator."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(acc), strict=True)
    for (path, grad), a in pairs:
        if jnp.promote_types(grad.dtype, a.dtype) != a.dtype:
            raise TypeError(
                f"updates{jax.tree_util.keystr(path)} is {grad.dtype}, which an accumulator of "
                f"{a.dtype} would round. Pass accumulator_dtype={grad.dtype} to the constructor."
            )


def require_own_width(params: Tree, floor: Any) -> None:
    """Raises a `ValueError` if a parameter is narrower than its accumulator would be."""
    for path, p in jax.tree_util.tree_leaves_with_path(params):
        wanted = jnp.promote_types(p.dtype, floor)
        if wanted != p.dtype:
            raise ValueError(
                f"references=True adds gradients as they come, but params"
                f"{jax.tree_util.keystr(path)} is {p.dtype} and would be summed in {wanted}. "
                "Keep the parameters in that dtype and cast inside loss_fn, or leave it out."
            )


def real_dtype(dtype: Any) -> jnp.dtype:
    """The real counterpart of a complex dtype; any other as it is."""
    return jnp.finfo(dtype).dtype


def contribution(grad: jax.Array, weight: jax.Array | None, scale: bool, dtype: Any) -> jax.Array:
    """What one microbatch adds: `weight * grad`, or `grad`; 0 if the weight is 0, even for NaN."""
    grad = grad.astype(dtype)
    if weight is None:
        return grad
    scaled = weight.astype(real_dtype(dtype)) * grad if scale else grad
    return jnp.where(weight == 0, 0, scaled)


def contributions(grads: Tree, weight: jax.Array | None, scale: bool, floor: Any) -> Tree:
    """What a group of one microbatch sums to, in the dtype an accumulator would have."""
    return jax.tree.map(
        lambda g: contribution(g, weight, scale, jnp.promote_types(g.dtype, floor)), grads
    )


def add(
    acc: Tree, comp: Tree, grads: Tree, weight: jax.Array | None, scale: bool, first: jax.Array
) -> tuple[Tree, Tree]:
    """Adds a microbatch to the accumulator; starts from nothing where `first`.

    The accumulator is reset by this mask when a group begins, not zeroed when one
    ends: it costs no extra pass, and nothing that the last group left (an inf, a
    NaN) can be seen.

    Args:
      acc: accumulated so far.
      comp: Kahan's compensation, a tree like `acc`; or `()` to sum plainly.
      grads: gradients of the microbatch.
      weight: scalar of this microbatch, or `None` for 1.
      scale: multiply by the weight (gradient of a mean), or not (of a sum).
      first: boolean scalar: this microbatch opens a group.

    Returns:
      The new `acc` and `comp`.

    References:
      Kahan, "Further remarks on reducing truncation errors",
      Communications of the ACM 8(1), 1965.
    """

    def plain(a: jax.Array, g: jax.Array) -> jax.Array:
        return jnp.where(first, 0, a) + contribution(g, weight, scale, a.dtype)

    if isinstance(comp, tuple) and comp == ():
        return jax.tree.map(plain, acc, grads), ()

    totals, lost = [], []
    leaves, treedef = jax.tree.flatten(acc)
    rest = zip(leaves, jax.tree.leaves(comp), jax.tree.leaves(grads), strict=True)
    for a, c, g in rest:
        a, c = jnp.where(first, 0, a), jnp.where(first, 0, c)
        y = contribution(g, weight, scale, a.dtype) - c
        total = a + y
        totals.append(total)
        lost.append((total - a) - y)
    return jax.tree.unflatten(treedef, totals), jax.tree.unflatten(treedef, lost)


def scaled(tree: Tree, factor: jax.Array) -> Tree:
    """Each leaf times a real scalar, in the leaf's own dtype.

    To divide by a scalar, hand over its reciprocal: dividing a tree by a traced
    scalar made XLA write out a whole tree.
    """
    return jax.tree.map(lambda x: x * factor.astype(real_dtype(x.dtype)), tree)


def cast_for_inner(mean: Tree, grads: Tree, params: Tree | None) -> Tree:
    """Casts to `result_type(gradient, parameter)`, what an inner optimizer is to see.

    Without parameters nothing is known to be narrower than the accumulator.
    """
    if params is None:
        return mean

    def cast(x: jax.Array, g: jax.Array, p: Any) -> jax.Array:
        return x.astype(jnp.promote_types(jnp.result_type(g), jnp.result_type(p)))

    return jax.tree.map(cast, mean, grads, params)


def as_dtype_of(new: Any, old: Any) -> Any:
    """`new` in the dtype of `old`: states and updates keep theirs though a gradient be wider."""
    dtype = getattr(old, "dtype", None)
    return new if dtype is None or new.dtype == dtype else new.astype(dtype)


def can_hold(acc: Tree, tree: Tree) -> bool:
    """Whether each leaf of `tree` has its place in `acc`: same form, and no wider dtype."""
    places: Any = jax.tree.structure(acc)
    if places != jax.tree.structure(tree):
        return False

    def form(x: Any) -> tuple[Any, ...]:
        kind = jax.typeof(x)
        return kind.shape, getattr(kind, "sharding", None), getattr(kind, "vma", None)

    pairs = zip(jax.tree.leaves(acc), jax.tree.leaves(tree), strict=True)
    return all(
        form(a) == form(x) and jnp.promote_types(x.dtype, a.dtype) == a.dtype for a, x in pairs
    )


def global_norm(tree: Tree) -> jax.Array:
    """Square root of the sum of the squares of all entries; at least float32."""

    def squares(x: jax.Array) -> jax.Array:
        x = jnp.abs(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
        return jnp.sum(jnp.square(x))

    return jnp.sqrt(sum(map(squares, jax.tree.leaves(tree)), jnp.zeros(())))


def all_finite(tree: Tree) -> jax.Array:
    """Whether every entry is finite; one pass. True for an empty tree.

    By a sum of zeros, which one NaN or infinity spoils: where XLA does not fuse the
    reduction, as on the CPU, flags for the whole tree would cost a quarter of it. (The
    largest magnitude would not do: XLA's vectorised maximum loses a NaN on the CPU.)
    """

    def spoiled(x: jax.Array) -> jax.Array:
        parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
        return jnp.stack([jnp.sum(part * 0) for part in parts])

    flags = [jnp.all(jnp.isfinite(spoiled(x))) for x in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(flags)) if flags else jnp.asarray(True)
