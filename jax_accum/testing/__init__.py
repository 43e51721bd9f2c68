"""Helpers for the tests of training code: the same gradient, its dump, what a program sends."""

from jax_accum.testing._collectives import KINDS, Collective, count_collectives
from jax_accum.testing._dump import GradientDump, gradient_dump, gradient_load
from jax_accum.testing._same_gradient import assert_same_gradient

__all__ = [
    "KINDS",
    "Collective",
    "GradientDump",
    "assert_same_gradient",
    "count_collectives",
    "gradient_dump",
    "gradient_load",
]
