"""Weighted: sums and weights add, means do not."""

import operator

import jax
import numpy as np
import pytest

import jax_accum as ja


def test_sums_and_weights_add():
    both = ja.Weighted(1024.0, 512) + ja.Weighted(6144.0, 1536)
    assert both == ja.Weighted(7168.0, 2048)
    assert both.mean == 3.5


def test_a_plain_tuple_is_not_joined():
    with pytest.raises(TypeError):
        operator.add(ja.Weighted(1.0, 1), (2.0, 3))


def test_the_mean_of_nothing_is_0_with_gradient_0():
    assert jax.value_and_grad(lambda total: ja.Weighted(total, 0).mean)(np.nan) == (0, 0)


def test_it_is_a_tree_of_two_leaves():
    doubled = jax.tree.map(lambda x: 2 * x, ja.Weighted(1.0, 3))
    assert doubled == ja.Weighted(2.0, 6)
