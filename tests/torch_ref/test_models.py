"""The GPT against the same mathematics written out in NumPy."""

import numpy as np
import pytest
import torch

from torch_ref.models import GPT, GPTConfig


def numpy_gpt(p: dict[str, np.ndarray], tokens: np.ndarray, layers: int, heads: int) -> np.ndarray:
    """Logits `[T, V]` of one row, position by position where causality matters."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        return (
            centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p[f"{name}.weight"]
            + p[f"{name}.bias"]
        )

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    x = p["tok_emb.weight"][tokens] + p["pos_emb.weight"][: len(tokens)]
    for i in range(layers):
        h = norm(x, f"blocks.{i}.ln1")
        q, k, v = (linear(h, f"blocks.{i}.attn.{n}") for n in "qkv")
        d = q.shape[-1] // heads
        mixed = np.zeros_like(q)
        for head in range(heads):
            s = slice(head * d, (head + 1) * d)
            for t in range(len(tokens)):
                scores = k[: t + 1, s] @ q[t, s] / np.sqrt(d)
                weights = np.exp(scores - scores.max())
                mixed[t, s] = weights @ v[: t + 1, s] / weights.sum()
        x = x + linear(mixed, f"blocks.{i}.attn.o")
        u = linear(norm(x, f"blocks.{i}.ln2"), f"blocks.{i}.mlp.up")
        gelu = 0.5 * u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))
        x = x + linear(gelu, f"blocks.{i}.mlp.down")
    return norm(x, "ln_f") @ p["head.weight"].T


def test_logits_are_those_of_the_formulas_written_out_in_numpy(tiny_gpt) -> None:
    model = tiny_gpt(torch.float64)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # weights of size 0.5, so that no part of the formula hides
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).double() / 2)
    tokens = torch.randint(0, 32, (3, 9), generator=generator)
    got = model(tokens).detach().numpy()
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    want = np.stack([numpy_gpt(weights, row.numpy(), layers=2, heads=2) for row in tokens])
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_padding_at_the_end_changes_no_logits_before_it(tiny_gpt) -> None:
    model, tokens = tiny_gpt(), torch.arange(12).view(1, 12)
    padded = tokens.clone()
    padded[:, 7:] = 0
    assert torch.equal(model(tokens)[:, :7], model(padded)[:, :7])
    assert not torch.equal(model(tokens)[:, 7:], model(padded)[:, 7:])


def test_parameter_names_and_shapes_are_the_conventional_ones() -> None:
    model = GPT(GPTConfig(vocab_size=11, max_length=7, layers=1, heads=2, width=4))
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        "tok_emb.weight": (11, 4),
        "pos_emb.weight": (7, 4),
        **{f"blocks.0.{ln}.{part}": (4,) for ln in ("ln1", "ln2") for part in ("weight", "bias")},
        **{f"blocks.0.attn.{n}.weight": (4, 4) for n in "qkvo"},
        **{f"blocks.0.attn.{n}.bias": (4,) for n in "qkvo"},
        "blocks.0.mlp.up.weight": (16, 4),
        "blocks.0.mlp.up.bias": (16,),
        "blocks.0.mlp.down.weight": (4, 16),
        "blocks.0.mlp.down.bias": (4,),
        "ln_f.weight": (4,),
        "ln_f.bias": (4,),
        "head.weight": (11, 4),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_every_dtype_starts_at_the_same_weights_and_keeps_to_itself(tiny_gpt, dtype) -> None:
    single, other = tiny_gpt(torch.float32), tiny_gpt(dtype)
    assert other(torch.zeros(1, 3, dtype=torch.long)).dtype == dtype
    narrow = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    for a, b in zip(single.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.to(narrow), b.to(narrow))


def test_a_seed_decides_the_weights_and_no_global_random_state_is_touched(tiny_gpt) -> None:
    torch.manual_seed(0)
    first = tiny_gpt(seed=1).head.weight
    torch.manual_seed(99)
    model = tiny_gpt(seed=1)
    assert torch.equal(first, model.head.weight)
    assert not torch.equal(first, tiny_gpt(seed=2).head.weight)
    before = torch.get_rng_state()
    model.draw_weights(5)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"layers": 0}, "layers must be at least 1"),
        ({"vocab_size": -3}, "vocab_size must be at least 1"),
        ({"heads": 3, "width": 64}, "heads must divide width"),
    ],
    ids=["no-layers", "negative-vocabulary", "heads-that-do-not-divide-the-width"],
)
def test_impossible_sizes_are_refused_by_name(sizes: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        GPTConfig(**sizes)


def test_a_row_longer_than_the_position_table_is_refused(tiny_gpt) -> None:
    with pytest.raises(ValueError, match="rows of 17, but max_length is 16"):
        tiny_gpt()(torch.zeros(1, 17, dtype=torch.long))
