"""Keys by example ID: a function of key and ID alone, with all 64 bits of the ID."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_accum as ja

KEY = jax.random.key(0)


def data(keys):
    return np.asarray(jax.random.key_data(keys))


def test_a_key_depends_on_the_id_and_on_nothing_else():
    ids = np.array([5, 3, 5, 9])
    keys = data(ja.example_keys(KEY, ids))
    assert (keys[0] == keys[2]).all()
    assert len({k.tobytes() for k in keys}) == 3
    assert (data(ja.example_keys(KEY, ids[::-1].reshape(2, 2))).reshape(4, -1)[::-1] == keys).all()
    assert (data(ja.example_keys(jax.random.key(1), ids)) != keys).any(axis=1).all()


@pytest.mark.parametrize("other", [7 + 2**32, 7 + 2**40, 7 - 2**63, -7])
def test_no_bit_of_an_id_is_lost(other):
    keys = data(ja.example_keys(KEY, np.array([7, other], np.int64)))
    assert (keys[0] != keys[1]).any()


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint32, np.int64, np.uint64])
def test_an_id_has_the_same_key_in_every_integer_type(dtype):
    want = data(ja.example_keys(KEY, [100]))
    assert (data(ja.example_keys(KEY, np.array([100], dtype))) == want).all()


def test_traced_and_host_ids_have_the_same_keys():
    ids = np.array([-1, 0, 2**31 - 1], np.int32)
    want = data(ja.example_keys(KEY, ids))
    assert (data(jax.jit(ja.example_keys)(KEY, ids)) == want).all()
    assert (data(ja.example_keys(KEY, jnp.asarray(ids))) == want).all()


def test_traced_ids_of_64_bits(x64):
    ids = np.array([7, 7 + 2**40, -1], np.int64)
    assert (data(jax.jit(ja.example_keys)(KEY, ids)) == data(ja.example_keys(KEY, ids))).all()


def test_keys_of_the_old_kind_are_returned_for_them():
    old = jax.random.PRNGKey(0)
    keys = ja.example_keys(old, np.arange(3))
    assert (keys.shape, keys.dtype) == ((3, 2), jnp.uint32)
    assert (keys == data(ja.example_keys(KEY, np.arange(3)))).all()


@pytest.mark.parametrize(
    ("key", "ids", "error", "message"),
    [
        (KEY, np.ones(2), TypeError, "ids must be integers.*float64"),
        (KEY, ["a"], TypeError, "ids must be integers"),
        (KEY, np.array([True]), TypeError, "ids must be integers"),
        (0, np.arange(2), TypeError, "key must be a key made by jax.random.key, got int"),
        (jax.random.split(KEY, 2), np.arange(2), ValueError, "key must be one key"),
    ],
    ids=["floating ids", "names", "booleans", "a seed", "several keys"],
)
def test_bad_input_is_named(key, ids, error, message):
    with pytest.raises(error, match=message):
        ja.example_keys(key, ids)
