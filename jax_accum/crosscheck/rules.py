"""Parameter maps as rules: renames, transposes, merged axes, stacked layers, joined projections.

A rule names a JAX array and a PyTorch array, and says which axes of the one make up which axis of
the other. `RuleMap` applies rules to two models, and is satisfied only if every parameter of both
has exactly one counterpart.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jax_accum.crosscheck.maps import Arrays

Tree = Any
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Rule:
    """One kind of parameter under its two names.

    Args:
      jax: path in the JAX tree, parted by ``/``; ``{i}`` and the like stand for any name.
      torch: name in ``named_parameters()``, parted by ``.``; the same placeholders.
      axes: for each PyTorch axis, the axis or the axes of the JAX array that make it up, in order.
        ``(1, 0)`` is a transpose; ``((1, 2), 0)`` makes ``[H * D, C]`` of ``[C, H, D]``. None
        leaves the array as it is.
      stacked: the JAX array holds all layers along a leading axis, and ``{i}`` of the PyTorch name
        counts them; ``axes`` are those of one layer.
      part: ``(k, n)``: it is the k-th, from 0, of n equal blocks of rows of the PyTorch array, as
        the query, key and value projections of `torch.nn.MultiheadAttention` are.

    >>> Rule("layers_{i}/kernel", "layers.{i}.weight", axes=(1, 0)).torch
    'layers.{i}.weight'
    """

    jax: str
    torch: str
    axes: tuple[int | tuple[int, ...], ...] | None = None
    stacked: bool = False
    part: tuple[int, int] | None = None


@dataclass(frozen=True)
class _Link:
    """A rule applied to one parameter: ``layer`` of the JAX array ``jax`` is ``torch``."""

    rule: Rule
    jax: str
    torch: str
    layer: int | None

    def forth(self, array: NDArray[Any]) -> NDArray[Any]:
        one = array if self.layer is None else array[self.layer]
        if self.rule.axes is None:
            return np.asarray(one)
        groups = _groups(self.rule)
        order = [axis for group in groups for axis in group]
        if sorted(order) != list(range(one.ndim)):
            raise ValueError(
                f"axes of the rule for {self.jax!r} are {self.rule.axes}, and the array is "
                f"{one.shape}: name each of its axes once"
            )
        shape = [int(np.prod([one.shape[axis] for axis in group])) for group in groups]
        return np.ascontiguousarray(one.transpose(order)).reshape(shape)

    def back(self, array: NDArray[Any], shape: Sequence[int]) -> NDArray[Any]:
        """The inverse; ``shape`` is of one layer on the JAX side."""
        if self.rule.axes is None:
            return np.asarray(array)
        order = [axis for group in _groups(self.rule) for axis in group]
        parted = array.reshape([shape[axis] for axis in order])
        return np.ascontiguousarray(parted.transpose(np.argsort(order)))


class RuleMap:
    """Rules applied to the parameters of two models.

    Args:
      rules: in any order.
      jax: shapes by JAX path, of all parameters.
      torch: shapes by PyTorch name, of all parameters.

    Raises:
      ValueError: parameters without a counterpart (all are listed, of both sides), one that is
        mapped twice, or shapes that do not agree.

    >>> rules = [Rule("dense/kernel", "0.weight", axes=(1, 0))]
    >>> mapping = RuleMap(rules, {"dense/kernel": (3, 5)}, {"0.weight": (5, 3)})
    >>> mapping.to_torch({"dense/kernel": np.zeros((3, 5))})["0.weight"].shape
    (5, 3)
    """

    def __init__(self, rules: Sequence[Rule], jax: Shapes, torch: Shapes) -> None:
        self._jax, self._torch = dict(jax), dict(torch)
        self._links = [link for rule in rules for link in _applied(rule, self._jax)]
        self._check()

    def _check(self) -> None:
        ours = Counter((link.jax, link.layer) for link in self._links)
        theirs = Counter((link.torch, link.rule.part) for link in self._links)
        for side, uses in (("jax", ours), ("torch", theirs)):
            twice = [name for (name, _), count in uses.items() if count > 1]
            if twice:
                raise ValueError(
                    f"rules map the {side} parameter {twice[0]!r} more than once: "
                    "each has exactly one counterpart"
                )
        mapped, named = {n for n, _ in ours}, {n for n, _ in theirs}
        left_jax = sorted(set(self._jax) - mapped)
        left_torch = sorted(set(self._torch) - named)
        absent = sorted(named - set(self._torch))
        if left_jax or left_torch or absent:
            raise ValueError(
                f"the map is not complete. Not mapped in JAX: {', '.join(left_jax) or 'none'}. "
                f"Not mapped in PyTorch: {', '.join(left_torch) or 'none'}. "
                f"Mapped, but not in PyTorch: {', '.join(absent) or 'none'}"
            )
        made = self.to_torch({path: np.zeros(shape) for path, shape in self._jax.items()})
        for name, array in made.items():
            if array.shape != tuple(self._torch[name]):
                froms = [f"{x.jax} {self._jax[x.jax]}" for x in self._links if x.torch == name]
                raise ValueError(
                    f"{', '.join(froms)} maps to {array.shape}, but {name} is "
                    f"{tuple(self._torch[name])}: mend the rule's axes, or the sizes"
                )

    def to_torch(self, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        """NumPy arrays by JAX path, as NumPy arrays by PyTorch name."""
        parts: dict[str, dict[int, NDArray[Any]]] = {}
        for link in self._links:
            place = link.rule.part[0] if link.rule.part else 0
            parts.setdefault(link.torch, {})[place] = link.forth(np.asarray(arrays[link.jax]))
        ordered = {name: [blocks[k] for k in sorted(blocks)] for name, blocks in parts.items()}
        return {
            name: found[0] if len(found) == 1 else np.concatenate(found)
            for name, found in ordered.items()
        }

    def to_jax(self, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        """NumPy arrays by PyTorch name, as NumPy arrays by JAX path."""
        made: Arrays = {}
        layers: dict[str, dict[int, NDArray[Any]]] = {}
        for link in self._links:
            array = np.asarray(arrays[link.torch])
            if link.rule.part:
                array = np.split(array, link.rule.part[1])[link.rule.part[0]]
            shape = self._jax[link.jax]
            if link.layer is None:
                made[link.jax] = link.back(array, shape)
            else:
                layers.setdefault(link.jax, {})[link.layer] = link.back(array, shape[1:])
        for path, found in layers.items():
            made[path] = np.stack([found[layer] for layer in sorted(found)])
        return {path: made[path] for path in self._jax}


def named_arrays(tree: Tree) -> Arrays:
    """The leaves of any JAX tree as NumPy arrays by path.

    >>> list(named_arrays({"layers": [{"kernel": np.zeros(2)}]}))
    ['layers/0/kernel']
    """
    return {_path(path): np.array(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def rebuilt(tree: Tree, arrays: Mapping[str, Any]) -> Tree:
    """A tree like ``tree`` with the leaves of `named_arrays`."""
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[_path(path)], tree)


def _path(path: Sequence[Any]) -> str:
    parts = []
    for key in path:
        names = (getattr(key, name, None) for name in ("key", "name", "idx"))
        parts.append(str(next(name for name in names if name is not None)))
    return "/".join(parts)


def _groups(rule: Rule) -> list[tuple[int, ...]]:
    return [axis if isinstance(axis, tuple) else (axis,) for axis in rule.axes or ()]


def _applied(rule: Rule, shapes: Shapes) -> list[_Link]:
    """The links that a rule makes: one for each JAX name that it fits, and each stacked layer."""
    pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^/]+)", re.escape(rule.jax))
    links = []
    for path, shape in shapes.items():
        match = re.fullmatch(pattern, path)
        if match is None:
            continue
        names = match.groupdict()
        if rule.stacked:
            free = set(re.findall(r"\{(\w+)\}", rule.torch)) - set(names)
            if len(free) != 1:
                raise ValueError(
                    f"the stacked rule for {rule.jax!r} needs one placeholder in {rule.torch!r} "
                    "that counts the layers, such as {i}"
                )
            (counter,) = free
            for layer in range(shape[0]):
                torch = rule.torch.format(**names, **{counter: layer})
                links.append(_Link(rule, path, torch, layer))
        else:
            links.append(_Link(rule, path, rule.torch.format(**names), None))
    if not links:
        raise ValueError(
            f"no JAX parameter fits the rule for {rule.jax!r}; there are: {', '.join(shapes)}"
        )
    return links
