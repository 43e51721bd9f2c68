"""Plain trees of arrays: one call per update."""

import jax.numpy as jnp
import task

import jax_accum as ja


def loss_fn(params, batch):
    """The sum over the supervised rows, and their number."""
    logits = jnp.tanh(batch["x"] @ params["in"]) @ params["out"]
    return ja.losses.softmax_cross_entropy(logits, batch["y"])


tx = ja.guard(task.optimizer())
train_step = ja.make_train_step(loss_fn, tx, task.MICROBATCHES)

params = dict(zip(("in", "out"), task.weights(), strict=True))
opt_state = tx.init(params)
for batch in task.batches():
    params, opt_state, metrics = train_step(params, opt_state, batch, examples=task.ROWS)

task.report(params.values(), counts=ja.counts(opt_state))
