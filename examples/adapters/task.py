"""What all adapters train: two layers on rows of which some are not supervised.

Every script trains it through its own library, and prints the parameters that it arrives at. They
are those of `undivided`: plain JAX that takes every batch whole.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax

UPDATES, ROWS, MICROBATCHES = 3, 8, 4
WIDTHS = (5, 6, 3)


def batches():
    """One batch per update: x `[ROWS, 5]`, y `[ROWS]`, -100 where nothing is supervised."""
    rng = np.random.default_rng(0)
    for _ in range(UPDATES):
        y = rng.integers(0, WIDTHS[-1], ROWS).astype(np.int32)
        y[rng.random(ROWS) < 0.4] = -100
        yield {"x": rng.normal(size=(ROWS, WIDTHS[0])).astype(np.float32), "y": y}


def microbatches(batch):
    """The batch in `MICROBATCHES` pieces, in order."""
    size = ROWS // MICROBATCHES
    for start in range(0, ROWS, size):
        yield {name: x[start : start + size] for name, x in batch.items()}


def weights():
    """The two matrices before the first update, float32."""
    rng = np.random.default_rng(1)
    shapes = (WIDTHS[:2], WIDTHS[1:])
    return [jnp.asarray(rng.normal(size=shape) / 3, jnp.float32) for shape in shapes]


def optimizer():
    """Clipping, then SGD with momentum, whose updates tell gradients of different sizes apart."""
    return optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))


def undivided(tx=None, trained=(True, True)):
    """The two matrices after `UPDATES` updates, without this library."""
    tx = optimizer() if tx is None else tx

    def loss(params, batch):
        log_p = jax.nn.log_softmax(jnp.tanh(batch["x"] @ params[0]) @ params[1])
        some = batch["y"] >= 0
        picked = jnp.take_along_axis(log_p, jnp.where(some, batch["y"], 0)[:, None], 1)[:, 0]
        return -jnp.sum(jnp.where(some, picked, 0)) / jnp.sum(some)

    @jax.jit
    def update(params, state, batch):
        grads = jax.grad(loss)(params, batch)
        grads = [g if is_trained else 0 * g for g, is_trained in zip(grads, trained, strict=True)]
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = weights()
    state = tx.init(params)
    for batch in batches():
        params, state = update(params, state, batch)
    return params


def report(matrices, **more):
    """Prints the two matrices, and whatever else there is to check, as JSON."""
    print(json.dumps({"matrices": [np.asarray(x).tolist() for x in matrices], **more}))
