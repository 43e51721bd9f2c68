"""Fine-tunes a pretrained ALBERT on hidden tokens of reactions, in JAX and PyTorch side by side.

    python examples/pretrained/masked_lm.py [--layers 12] [--plant mean-of-means]

Both accumulate the same group of microbatches from the same pretrained weights. In float64 the two
gradients agree to 1e-12; in float32 each is at most four times as far from the float64 gradient as
its own framework's undivided one is. Ends with status 1 where that does not hold.
"""

import argparse
import copy
import sys

import jax
import numpy as np
import optax
import torch
from models import ALBERT, folder_of, in_flax_layout, load
from reactions import masked, reactions

import jax_accum as ja
import torch_ref.accumulate
import torch_ref.gradients
import torch_ref.losses
import torch_ref.train
import torch_ref.undivided

EXAMPLES = 16  # per update
MICROBATCHES = 4
UPDATES = 3


def jax_loss(module):
    """The loss of the Flax model: a sum over hidden tokens, and their number."""

    def loss(params, batch):
        ids = batch["input_ids"]
        places = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        kinds = np.zeros(ids.shape, np.int32)
        logits = module.apply(
            {"params": params}, ids, batch["attention_mask"], kinds, places
        ).logits
        return ja.losses.softmax_cross_entropy(logits, batch["labels"])

    return loss


def torch_loss(model, batch):
    """The same of the PyTorch model."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return torch_ref.losses.softmax_cross_entropy(logits, batch["labels"])


def torch_parts(batch):
    """A group's microbatches, as PyTorch tensors."""
    rows = np.split(np.arange(EXAMPLES), MICROBATCHES)
    return [{k: torch.from_numpy(v[r]).long() for k, v in batch.items()} for r in rows]


def torch_gradients(model, batch):
    """Accumulated and undivided gradients of the PyTorch model, in Flax's layout."""
    parts = torch_parts(batch)
    torch_ref.accumulate.accumulate(model, torch_loss, parts)
    accumulated = torch_ref.gradients.gradients(model)
    model.zero_grad()
    whole = torch_ref.undivided.concatenate(parts)
    alone = torch_ref.undivided.undivided(model, torch_loss, whole, dtype=None).gradients
    return in_flax_layout(accumulated), in_flax_layout(alone)


def jax_gradients(module, params, batch, plant=None):
    """Accumulated and undivided gradients of the Flax model."""
    loss = jax_loss(module)
    if plant == "mean-of-means":

        def accumulated_loss(params, part):
            return ja.Weighted(loss(params, part).mean, 1.0)

    else:
        accumulated_loss = loss
    accumulate = ja.accumulated_value_and_grad(accumulated_loss, MICROBATCHES)
    _, accumulated = jax.jit(accumulate)(params, batch)
    alone = jax.jit(jax.grad(lambda p, b: loss(p, b).mean))(params, batch)
    return accumulated, alone


def compare(model, module, params, batch, plant=None):
    """Holds the gradients of one group against each other; raises AssertionError."""
    weights = [int((part["labels"] != -100).sum()) for part in torch_parts(batch)]
    print(f"{EXAMPLES} reactions in {MICROBATCHES} microbatches, hidden tokens in each: {weights}")

    clues = {"microbatches": MICROBATCHES, "weights": weights}
    same = ja.testing.assert_same_gradient
    _, exact = torch_gradients(copy.deepcopy(model).double(), batch)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
        accumulated, alone = jax_gradients(module.clone(dtype=np.float64), wide, batch, plant)
    same(alone, exact)
    print("float64, undivided, JAX and PyTorch: the same to 1e-12")
    same(accumulated, exact, **clues)
    print("float64, accumulated in JAX: the same to 1e-12")
    in_torch, torch_alone = torch_gradients(model, batch)
    in_jax, jax_alone = jax_gradients(module, params, batch, plant)
    same(in_jax, in_torch, exact, undivided=jax_alone, want_undivided=torch_alone, **clues)
    print("float32, accumulated in both: within four times the rounding of each")


def fine_tune(model, module, params, groups):
    """An update of AdamW for each group, in both, and the losses before them."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.01))
    step = ja.make_train_step(jax_loss(module), tx, MICROBATCHES)
    state = tx.init(params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    for number, batch in enumerate(groups, 1):
        params, state, metrics = step(params, state, batch)
        attempt = torch_ref.train.update(
            model, optimizer, torch_loss, torch_parts(batch), clip_norm=1.0
        )
        ours, theirs = float(metrics["loss"]), attempt.group.loss
        print(f"update {number}: loss {ours:.6f} in JAX, {theirs:.6f} in PyTorch")


def main():
    """Compares, then trains."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--layers", type=int, default=12)
    options.add_argument("--plant", choices=["mean-of-means"])
    chosen = options.parse_args()
    folder = folder_of("rxnmapper", *ALBERT)
    models = load(folder, "AlbertForMaskedLM", num_hidden_layers=chosen.layers)
    texts = np.split(np.array(reactions()[: UPDATES * EXAMPLES]), UPDATES)
    groups = [masked(group, folder / "vocab.txt", seed) for seed, group in enumerate(texts)]
    try:
        compare(*models, groups[0], chosen.plant)
    except AssertionError as error:
        print(error)
        return 1
    fine_tune(*models, groups)
    return 0


if __name__ == "__main__":
    sys.exit(main())
