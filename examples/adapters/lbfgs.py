"""LBFGS: its line search evaluates the loss again, and needs that of the whole group."""

import functools

import jax
import jax.numpy as jnp
import optax
import task

import jax_accum as ja


def loss_fn(params, batch):
    """The sum over the supervised rows, and their number."""
    logits = jnp.tanh(batch["x"] @ params[0]) @ params[1]
    return ja.losses.softmax_cross_entropy(logits, batch["y"])


tx = optax.lbfgs()
value_and_grad = ja.accumulated_value_and_grad(loss_fn, task.MICROBATCHES)


@jax.jit
def update(params, state, batch):
    """One update on one group, in memory for one microbatch, line search included."""

    def value_fn(params):
        (loss, _), _ = value_and_grad(params, batch)
        return loss

    # The search differentiates its function: tell it that the gradient comes with the value.
    value_fn = jax.custom_vjp(value_fn)
    value_fn.defvjp(
        lambda p: ((out := value_and_grad(p, batch))[0][0], out[1]),
        lambda grads, ct: (jax.tree.map(functools.partial(jnp.multiply, ct), grads),),
    )
    loss, grads = jax.value_and_grad(value_fn)(params)
    updates, state = tx.update(grads, state, params, value=loss, grad=grads, value_fn=value_fn)
    return optax.apply_updates(params, updates), state, loss


params = task.weights()
state = tx.init(params)
batch = next(task.batches())
losses = []
for _ in range(task.UPDATES):
    params, state, loss = update(params, state, batch)
    losses.append(float(loss))

task.report(params, losses=losses)
