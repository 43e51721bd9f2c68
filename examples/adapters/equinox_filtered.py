"""Equinox: the arrays are the parameters, the rest stays in the closure of the loss."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import task

import jax_accum as ja


class Classifier(eqx.Module):
    """Two matrices, and a function between them, which is no parameter."""

    matrices: list[jax.Array]
    between: Callable[[jax.Array], jax.Array] = jnp.tanh

    def __call__(self, x):
        """Logits `[3]` of one input `[5]`."""
        return self.between(x @ self.matrices[0]) @ self.matrices[1]


params, static = eqx.partition(Classifier(task.weights()), eqx.is_inexact_array)


def loss_fn(params, batch):
    """The sum over the supervised rows, and their number."""
    model = eqx.combine(params, static)
    return ja.losses.softmax_cross_entropy(jax.vmap(model)(batch["x"]), batch["y"])


tx = ja.guard(task.optimizer())
train_step = ja.make_train_step(loss_fn, tx, task.MICROBATCHES)
opt_state = tx.init(params)
for batch in task.batches():
    params, opt_state, metrics = train_step(params, opt_state, batch, examples=task.ROWS)

model = eqx.combine(params, static)
task.report(model.matrices, counts=ja.counts(opt_state))
