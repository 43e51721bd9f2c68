"""Memory over groups: what stays is found and called by its kind."""

import jax
import numpy as np
import optax
import pytest

from jax_accum.doctor import memory_growth
from tests.faults import problem as p

tx = optax.sgd(p.RATE)


def stepping(keep):
    def update(params, state, microbatches):
        grads = p.right_gradient(params, microbatches)
        keep(grads, microbatches)
        return *p.jitted(tx)(params, state, grads), {}

    return update


def test_a_step_that_keeps_nothing_does_not_grow():
    growth = memory_growth(stepping(lambda grads, batches: None), p.make_case(1, init=tx.init))
    assert not growth.grows
    assert len(set(growth.live_bytes)) == 1
    assert "Nothing piles up" in str(growth)


def test_gradients_and_batches_that_stay_are_called_by_their_kind_and_size():
    kept = []

    def keep(grads, batches):
        kept.append((grads["b1"], np.array(batches[0]["x"])))

    growth = memory_growth(stepping(keep), p.make_case(1, init=tx.init))
    assert set(growth.kinds) == {
        (f"jax.Array float32 of shape ({p.H},)", 1.0, 4.0 * p.H),
        (f"numpy.ndarray float32 of shape {(p.M, p.T, p.F)}", 1.0, 4.0 * p.M * p.T * p.F),
    }
    assert growth.live_bytes == sorted(growth.live_bytes)
    assert "Memory grows" in str(growth)


def test_what_only_the_first_groups_make_is_no_growth():
    kept = []

    def keep(grads, batches):
        if len(kept) < 2:
            kept.append(grads)

    assert not memory_growth(stepping(keep), p.make_case(1, init=tx.init)).grows


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="groups must be at least 2, got 1"):
        memory_growth(stepping(lambda *_: None), p.make_case(1, init=tx.init), groups=1)
    with pytest.raises(TypeError, match="case must be a doctor"):
        memory_growth(stepping(lambda *_: None), jax.devices())
