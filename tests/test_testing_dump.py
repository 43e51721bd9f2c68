"""Dumps of gradients: what was written comes back, and a stranger's file is safe to open."""

import io
import json
import os
import pickle
import struct
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

from jax_accum.testing import assert_same_gradient, gradient_dump, gradient_load
from jax_accum.testing._dump import META


@pytest.fixture
def path(tmp_path):
    return tmp_path / "gradient.npz"


def npy(array, **kwargs):
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, **kwargs)
    return buffer.getvalue()


def write(path, members, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as dump:
        for name, data in members:
            dump.writestr(name, data)


def npy_saying(shape, data, dtype="<f8"):
    """An array whose header says what it likes."""
    header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


@pytest.mark.parametrize(
    "dtype",
    ["float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "complex64", "int32", "bool"],
)
def test_arrays_come_back_bit_for_bit(dtype, path):
    values = np.random.default_rng(0).integers(0, 2, (3, 4)).astype(jnp.dtype(dtype))
    tree = {"a": {"b": values, "c": values.T}, "scalar": values[0, 0]}
    gradient_dump(path, tree, {"examples": [1, 2], "version": "é"})
    gradient, meta = gradient_load(path)
    assert meta == {"examples": [1, 2], "version": "é"}
    assert list(gradient) == ["a/b", "a/c", "scalar"]
    for name, want in (("a/b", values), ("a/c", values.T), ("scalar", values[0, 0])):
        np.testing.assert_array_equal(gradient[name], want, strict=True)
        assert gradient[name].dtype == jnp.dtype(dtype)


@pytest.mark.parametrize(
    "names", [["file"], [""], ["../../etc/x", "/root", "C:\\x"], ["a.npy", "a"], ["α", "a b"]]
)
def test_any_name_comes_back(names, path, tmp_path):
    tree = {name: np.full(2, i, np.float32) for i, name in enumerate(names)}
    gradient_dump(path, tree)
    assert list(gradient_load(path).gradient) == sorted(names)
    assert os.listdir(tmp_path) == ["gradient.npz"]


def test_a_dump_is_compared_with_what_it_was_made_of(path):
    tree = {"a": jnp.arange(30.0), "b": {"c": jnp.ones((2, 2), jnp.bfloat16)}}
    gradient_dump(path, tree)
    assert_same_gradient(gradient_load(path).gradient, tree)
    with pytest.raises(AssertionError, match="4 times"):
        assert_same_gradient(
            gradient_load(path).gradient, {"a": tree["a"] / 4, "b": {"c": 0.25 * tree["b"]["c"]}}
        )


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_numpy_alone_wrote_is_read(save, path):
    save(path, **{"head.weight": np.ones((2, 3), np.float32), "fortran": np.ones((2, 3)).T})
    gradient, meta = gradient_load(path)
    assert meta == {}
    assert {name: a.shape for name, a in gradient.items()} == {
        "head.weight": (2, 3),
        "fortran": (3, 2),
    }


def test_numpy_reads_a_dump_without_pickle(path):
    gradient_dump(path, {"a": np.ones(3)}, {"m": 1})
    with np.load(path, allow_pickle=False) as loaded:
        np.testing.assert_array_equal(loaded["a"], np.ones(3))


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return open, (self.mark, "w")


def test_a_pickle_is_refused_and_not_run(path, tmp_path):
    mark = tmp_path / "ran"
    bomb = np.array([Bomb(mark)], dtype=object)
    write(path, [("a.npy", npy(bomb, allow_pickle=True))])
    with pytest.raises(ValueError, match="Python objects, which are never loaded"):
        gradient_load(path)
    assert not mark.exists()
    with np.load(path, allow_pickle=True) as loaded:  # the trap is live: NumPy told to, runs it
        loaded["a"][0].close()
    assert mark.exists()


def test_a_pickle_alone_is_no_dump(path, tmp_path):
    path.write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(ValueError, match=r"no whole .npz file"):
        gradient_load(path)
    assert not (tmp_path / "ran").exists()


def zeros_packed(size):
    return npy_saying(f"({size},)", bytes(size), "|u1")


def meta_of(said):
    return npy(np.frombuffer(json.dumps(said).encode(), np.uint8))


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([("a.npy", npy_saying("(10**15,)", b"12345678"))], "cannot be read at a"),
        ([("a.npy", npy_saying("(1000000000000000,)", b"12345678"))], "but it has 8"),
        ([("a.npy", npy_saying("(-1, -1)", b"12345678"))], "but it has 8"),
        ([("a.npy", npy_saying("(1,)", b"1234"))], "but it has 4"),
        ([("a.npy", npy_saying("(1,)", b"12345678" * 2))], "but it has 16"),
        ([("a.npy", npy(np.array(["x"])))], "a gradient is numbers"),
        ([("a.npy", npy(np.zeros(2, "f4,f4")))], "a gradient is numbers"),
        ([("a.npy", b"\x93NUMPY\x09\x00" + bytes(200))], "cannot be read at a"),
        ([("a.npy", b"")], "cannot be read at a"),
        ([("a.npy", npy_saying("(1,)" + " " * 20_000, b"12345678"))], "cannot be read at a"),
        ([("a.npy", npy_saying("(__import__('os').getpid(),)", b"12345678"))], "cannot be read"),
        ([("a.txt", b"hello")], "'a.txt', which is no NumPy array"),
        ([], "holds no array"),
        ([(f"{META}.npy", meta_of({"arrays": 0, "dtypes": {}, "meta": {}}))], "holds no array"),
        (
            [(f"{META}.npy", meta_of({"arrays": 1, "dtypes": {}, "meta": {}}))],
            "with 1 arrays, and 0",
        ),
        ([("a.npy", npy(np.ones(2))), (f"{META}.npy", npy(np.ones(2)))], "not a dump's"),
        ([("a.npy", npy(np.ones(2))), (f"{META}.npy", meta_of([1]))], "not a dump's"),
        (
            [
                ("a.npy", npy(np.ones(2))),
                (f"{META}.npy", meta_of({"arrays": 1, "dtypes": {}, "meta": 1})),
            ],
            "not a dump's",
        ),
        (
            [
                ("a.npy", npy(np.ones(2))),
                (f"{META}.npy", npy(np.frombuffer(b"[" * 200_000, np.uint8))),
            ],
            "not a dump's",
        ),
        (
            [
                ("a.npy", npy(np.ones(2))),
                (f"{META}.npy", meta_of({"arrays": 1, "dtypes": {"a": "object"}, "meta": {}})),
            ],
            "'a' is 'object', but it is not stored so",
        ),
        (
            [
                ("a.npy", npy(np.ones(2))),
                (f"{META}.npy", meta_of({"arrays": 1, "dtypes": {"a": "bfloat16"}, "meta": {}})),
            ],
            "'a' is 'bfloat16', but it is not stored so",
        ),
    ],
    ids=[
        "a shape that is computed",
        "a shape larger than the file",
        "a negative shape",
        "cut short",
        "more than its shape",
        "strings",
        "records",
        "an unknown version",
        "an empty member",
        "a long header",
        "code in the header",
        "a text file",
        "nothing",
        "meta alone",
        "an array that is lost",
        "meta that is no JSON",
        "meta that is a list",
        "meta of no dictionary",
        "meta nested without end",
        "a dtype of objects",
        "a dtype of another size",
    ],
)
def test_a_file_that_is_no_dump_is_refused(members, words, path):
    write(path, members)
    with pytest.raises(ValueError, match=words):
        gradient_load(path)


def test_a_file_that_would_fill_memory_is_refused_before_it_does(path):
    write(path, [("a.npy", zeros_packed(2**26))], zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 2**20
    with pytest.raises(ValueError, match="over max_bytes=1048576"):
        gradient_load(path, max_bytes=2**20)
    assert gradient_load(path).gradient["a"].nbytes == 2**26


def test_two_arrays_of_one_name_are_refused(path):
    with pytest.warns(UserWarning, match="Duplicate name"):
        write(path, [("a.npy", npy(np.ones(2))), ("a.npy", npy(np.zeros(2)))])
    with pytest.raises(ValueError, match="'a' twice"):
        gradient_load(path)


def test_every_cut_and_every_flipped_byte_is_noticed(path):
    gradient_dump(path, {"a": np.arange(4.0)}, {"m": 1})
    whole, want = path.read_bytes(), gradient_load(path)
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"gradient.npz"):
            gradient_load(path)
    refused = 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            got = gradient_load(path)
        except ValueError:  # and nothing else
            refused += 1
        else:  # a byte that carries nothing, such as the time of writing
            np.testing.assert_array_equal(got.gradient["a"], want.gradient["a"], strict=True)
            assert got.meta == want.meta
    assert refused > len(whole) / 2


def test_a_dump_that_fails_leaves_the_old_one(path, monkeypatch, tmp_path):
    gradient_dump(path, {"a": np.ones(2)})

    def full(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        gradient_dump(path, {"a": np.zeros(2)})
    assert os.listdir(tmp_path) == ["gradient.npz"]
    np.testing.assert_array_equal(gradient_load(path).gradient["a"], np.ones(2))


@pytest.mark.parametrize(
    ("error", "words", "tree", "meta"),
    [
        (TypeError, "dtype object at a", {"a": np.array([None, 1])}, None),
        (ValueError, "no array", {}, None),
        (ValueError, "keeps for itself", {META: np.ones(1)}, None),
        (TypeError, "what JSON can", {"a": np.ones(1)}, {"x": np.ones(1)}),
        (TypeError, "what JSON can", {"a": np.ones(1)}, {"x": float("nan")}),
        (ValueError, "over the 1048576", {"a": np.ones(1)}, {"x": "x" * 2**20}),
        (TypeError, "float8_e4m3b11fnuz at a", {"a": jnp.ones(1, jnp.float8_e4m3b11fnuz)}, None),
    ],
    ids=["objects", "nothing", "its own name", "an array as meta", "NaN", "long meta", "rare type"],
)
def test_what_a_dump_cannot_hold_is_told(error, words, tree, meta, path):
    with pytest.raises(error, match=words):
        gradient_dump(path, tree, meta)
    assert not path.exists()


def test_a_missing_file_is_called_missing(path):
    with pytest.raises(FileNotFoundError):
        gradient_load(path)
