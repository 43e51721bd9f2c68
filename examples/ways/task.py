"""What all ways to run train: a small classifier on examples of differing weight.

Every script trains it twice, by the group gradient and by `MultiSteps`, and prints the
parameters that each arrives at. They are those of one device that takes the batch undivided.
"""

import json
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_accum as ja

UPDATES = 3
ROWS = 32  # examples per update


def loss_fn(params, batch):
    """Cross entropy: its sum over the supervised labels, and their number."""
    hidden = jnp.tanh(batch["x"] @ params["in"])
    return ja.losses.softmax_cross_entropy(hidden @ params["out"] + params["bias"], batch["y"])


def mean_loss(params, batch):
    """The mean, as `jax.grad` wants it, and what it is a mean over: for `MultiSteps`."""
    loss = loss_fn(params, batch)
    return loss.mean, loss.weight


def batches():
    """One batch per update: x `[ROWS, 8]`, y `[ROWS]`, of which some are not supervised."""
    rng = np.random.default_rng(0)
    for _ in range(UPDATES):
        y = rng.integers(0, 4, ROWS).astype(np.int32)
        y[rng.random(ROWS) < 0.4] = -100
        yield {"x": rng.normal(size=(ROWS, 8)).astype(np.float32), "y": y}


def init():
    """The parameters before the first update, float32."""
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)  # noqa: E731
    return {"in": draw(8, 16), "out": draw(16, 4), "bias": draw(4)}


def optimizer():
    """Clipping and AdamW; once per update."""
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def undivided():
    """What one device comes to that takes every batch whole, without this library."""

    def loss(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["in"])
        log_p = jax.nn.log_softmax(hidden @ params["out"] + params["bias"])
        some = batch["y"] >= 0
        picked = jnp.take_along_axis(log_p, jnp.where(some, batch["y"], 0)[:, None], 1)[:, 0]
        return -jnp.sum(jnp.where(some, picked, 0)) / jnp.sum(some)

    params, tx = init(), optimizer()
    state = tx.init(params)
    for batch in batches():
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        params = optax.apply_updates(params, updates)
    return params


def report(**params):
    """Prints the parameters of each run, as JSON."""
    as_lists = lambda tree: jax.tree.map(lambda x: np.asarray(x).tolist(), tree)  # noqa: E731
    print(json.dumps({name: as_lists(tree) for name, tree in params.items()}))
