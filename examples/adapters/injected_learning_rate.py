"""`optax.inject_hyperparams`: a learning rate that the host sets, between groups."""

import jax.numpy as jnp
import optax
import task

import jax_accum as ja

RATES = (0.1, 0.05, 0.2)


def loss_fn(params, batch):
    """The sum over the supervised rows, and their number."""
    logits = jnp.tanh(batch["x"] @ params[0]) @ params[1]
    return ja.losses.softmax_cross_entropy(logits, batch["y"])


# The guard is outermost, so the hyperparameters are one level down in its state.
tx = ja.guard(optax.inject_hyperparams(optax.sgd)(learning_rate=0.0, momentum=0.9))
train_step = ja.make_train_step(loss_fn, tx, task.MICROBATCHES)

params = task.weights()
opt_state = tx.init(params)
for rate, batch in zip(RATES, task.batches(), strict=True):
    opt_state.inner_state.hyperparams["learning_rate"] = jnp.asarray(rate)
    params, opt_state, metrics = train_step(params, opt_state, batch, examples=task.ROWS)

task.report(params, counts=ja.counts(opt_state))
