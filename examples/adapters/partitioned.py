"""`optax.partition` (once `multi_transform`): one optimizer per kind of parameter, one group."""

import jax
import jax.numpy as jnp
import optax
import task

import jax_accum as ja


def mean_loss(params, batch):
    """The mean, and what it is a mean over."""
    logits = jnp.tanh(batch["x"] @ params[0]) @ params[1]
    loss = ja.losses.softmax_cross_entropy(logits, batch["y"])
    return loss.mean, loss.weight


def optimizer():
    """Momentum for the first matrix, none for the second; both clipped together."""
    by_kind = {"first": optax.sgd(0.1, momentum=0.9), "second": optax.sgd(0.2)}
    return optax.chain(
        optax.clip_by_global_norm(0.5), optax.partition(by_kind, ["first", "second"])
    )


# Around all of it: inside, each part would count its own groups, and clipping would not wait.
opt = ja.MultiSteps(ja.guard(optimizer()), task.MICROBATCHES)


@jax.jit
def call(params, state, batch):
    """One microbatch."""
    grads, weight = jax.grad(mean_loss, has_aux=True)(params, batch)
    return opt.apply(grads, state, params, weight=weight, examples=len(batch["y"]))


params = task.weights()
state = opt.init(params)
for batch in task.batches():
    for microbatch in task.microbatches(batch):
        params, state = call(params, state, microbatch)

task.report(params, counts=ja.counts(state))
