"""Frozen parameters: `optax.masked`, and the way that saves their gradients and accumulators."""

import jax.numpy as jnp
import optax
import task

import jax_accum as ja


def logits_of(first, second, x):
    """Logits `[rows, 3]`."""
    return jnp.tanh(x @ first) @ second


# Frozen in the optimizer: the gradient of the first matrix is computed and added up, then dropped.
def loss_fn(params, batch):
    """The sum over the supervised rows, and their number."""
    return ja.losses.softmax_cross_entropy(logits_of(*params, batch["x"]), batch["y"])


frozen, trained = [True, False], [False, True]
tx = ja.guard(
    optax.chain(optax.masked(optax.set_to_zero(), frozen), optax.masked(task.optimizer(), trained))
)
step = ja.make_train_step(loss_fn, tx, task.MICROBATCHES)
params = task.weights()
opt_state = tx.init(params)
for batch in task.batches():
    params, opt_state, _ = step(params, opt_state, batch, examples=task.ROWS)


# Frozen in the loss: only what is trained is a parameter. No gradient, no accumulator, no state.
first, second = task.weights()


def loss_of_second(second, batch, first):
    """The same, of the second matrix."""
    return ja.losses.softmax_cross_entropy(logits_of(first, second, batch["x"]), batch["y"])


lean_tx = ja.guard(task.optimizer())
lean_step = ja.make_train_step(loss_of_second, lean_tx, task.MICROBATCHES)
lean_state = lean_tx.init(second)
for batch in task.batches():
    second, lean_state, _ = lean_step(second, lean_state, batch, first, examples=task.ROWS)

task.report([*params, first, second], counts=ja.counts(opt_state))
