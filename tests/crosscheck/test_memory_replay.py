"""Both frameworks run out of memory on the same group, and replay it to the same update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import jax_accum as ja
from jax_accum.crosscheck.gpt import GPT, GPTSizes, parameter_shapes
from jax_accum.crosscheck.maps import flatten, gpt_map, initial_weights, unflatten
from torch_ref import models as torch_models
from torch_ref.fitting import FittingUpdate
from torch_ref.losses import next_token_cross_entropy
from torch_ref.train import Counts

SIZES = GPTSizes(vocab_size=13, max_length=7, layers=1, heads=2, width=6)
LARGEST = 2
"""Microbatches of more examples run out of memory, on both sides."""


def rows():
    """Eight rows of 7 tokens; supervised are 1 to 7 of them, so that weights differ."""
    random = np.random.default_rng(3)
    tokens = random.integers(1, 13, (8, 7))
    mask = np.arange(7) < np.array([[7], [2], [5], [3], [7], [4], [2], [6]])
    return tokens, mask


def jax_run(weights, updates):
    model, tx = GPT(SIZES), ja.guard(optax.sgd(0.5, momentum=0.9))

    def loss_fn(params, batch):
        tokens, mask = batch
        logits = model.apply({"params": params}, tokens)
        return ja.losses.next_token_cross_entropy(logits, tokens, mask=mask)

    def make(plan):
        step = ja.make_train_step(loss_fn, tx, plan.microbatches)

        def out_of_memory(params, opt_state, batch):
            jax.tree.map(lambda x: x.delete(), (params, opt_state))
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

        return step if plan.microbatch_size <= LARGEST else out_of_memory

    step = ja.memory.fitting_step(make, ja.BatchPlan(microbatch_size=8, microbatches=1))
    params = jax.tree.map(jnp.asarray, unflatten(weights))
    state = tx.init(params)
    batch = tuple(map(jnp.asarray, rows()))
    for _ in range(updates):
        params, state, _ = step(params, state, batch)
    sizes = [(b.microbatch_size, a.microbatch_size) for _, b, a in step.changes]
    return {name: np.asarray(x) for name, x in flatten(params).items()}, sizes, ja.counts(state)


def torch_run(weights, updates):
    mapping = gpt_map(SIZES)
    model = torch_models.GPT(torch_models.GPTConfig(**vars(SIZES)), dtype=torch.float64)
    model.load_state_dict({n: torch.from_numpy(x) for n, x in mapping.to_torch(weights).items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    def loss_fn(model, part):
        if len(part) > LARGEST:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        tokens, mask = part[..., 0], part[..., 1]
        return next_token_cross_entropy(model(tokens), tokens, mask=mask)

    update, counts = FittingUpdate(model, optimizer, loss_fn, 8), Counts()
    batch = torch.from_numpy(np.stack(rows(), axis=-1))
    for _ in range(updates):
        update(batch, counts=counts)
    arrays = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return mapping.to_jax(arrays), [(c.before, c.after) for c in update.changes], counts


def test_jax_and_pytorch_take_the_same_smaller_size_and_replay_to_the_same_weights(x64):
    weights = initial_weights(parameter_shapes(SIZES), seed=0)
    ours, our_sizes, our_counts = jax_run(weights, updates=3)
    theirs, their_sizes, their_counts = torch_run(weights, updates=3)
    assert our_sizes == their_sizes == [(8, 4), (4, 2)]
    for name in ("updates", "microbatches", "tokens"):
        assert our_counts[name] == getattr(their_counts, name)
    off = sum(((ours[name] - theirs[name]) ** 2).sum() for name in weights)
    moved = sum(((ours[name] - weights[name]) ** 2).sum() for name in weights)
    assert 0 < off**0.5 < 1e-12 * moved**0.5
