"""Orbax: saved in the middle of a group, restored, and gone on with, bit for bit."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import task

import jax_accum as ja


def mean_loss(params, batch):
    """The mean, and what it is a mean over."""
    logits = jnp.tanh(batch["x"] @ params[0]) @ params[1]
    loss = ja.losses.softmax_cross_entropy(logits, batch["y"])
    return loss.mean, loss.weight


guarded = ja.guard(task.optimizer(), loss_scale=ja.DynamicLossScale(initial=1.0))
opt = ja.MultiSteps(guarded, task.MICROBATCHES)


@jax.jit
def call(params, state, batch):
    """One microbatch."""
    grads, weight = jax.grad(mean_loss, has_aux=True)(params, batch)
    return opt.apply(grads, state, params, weight=weight, examples=len(batch["y"]))


stream = [part for batch in task.batches() for part in task.microbatches(batch)]
params = task.weights()
state = opt.init(params)
for part in stream[:6]:  # one group and a half
    params, state = call(params, state, part)

with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
    path = Path(folder).absolute() / "half"
    checkpointer.save(path, (params, state))
    checkpointer.wait_until_finished()
    like = jax.eval_shape(lambda: (task.weights(), opt.init(task.weights())))
    on_one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_one_device), like
    )
    restored, restored_state = checkpointer.restore(path, like)

for part in stream[6:]:
    params, state = call(params, state, part)
    restored, restored_state = call(restored, restored_state, part)

same = jax.tree.map(lambda a, b: bool((a == b).all()), (params, state), (restored, restored_state))
task.report(restored, counts=ja.counts(restored_state), same=all(jax.tree.leaves(same)))
