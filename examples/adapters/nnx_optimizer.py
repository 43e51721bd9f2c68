"""Flax NNX with `nnx.Optimizer`: the group's gradient in one call, then its `update`.

`optimizer.step` counts calls of `update`, skipped ones included; what to log is in `ja.counts`.
"""

import jax.numpy as jnp
import task
from flax import nnx

import jax_accum as ja


class Classifier(nnx.Module):
    """Two layers, without biases."""

    def __init__(self, rngs):
        widths = task.WIDTHS
        self.in_layer = nnx.Linear(widths[0], widths[1], use_bias=False, rngs=rngs)
        self.out_layer = nnx.Linear(widths[1], widths[2], use_bias=False, rngs=rngs)

    def __call__(self, x):
        """Logits `[rows, 3]` of inputs `[rows, 5]`."""
        return self.out_layer(jnp.tanh(self.in_layer(x)))


model = Classifier(nnx.Rngs(0))
for layer, matrix in zip((model.in_layer, model.out_layer), task.weights(), strict=True):
    layer.kernel[...] = matrix
optimizer = nnx.Optimizer(model, ja.guard(task.optimizer()), wrt=nnx.Param)


@nnx.jit
def train_group(model, optimizer, batch):
    """One update."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, microbatch):
        logits = nnx.merge(graph, params, rest)(microbatch["x"])
        return ja.losses.softmax_cross_entropy(logits, microbatch["y"])

    value_and_grad = ja.accumulated_value_and_grad(loss_fn, task.MICROBATCHES)
    (loss, info), grads = value_and_grad(params, batch)
    # A weight of 0 says that nothing was supervised: a skip, which guard counts.
    optimizer.update(
        model,
        grads,
        weight=info.weights["loss"],
        examples=len(batch["y"]),
        microbatches=info.counts["microbatches"],
    )
    return loss


for batch in task.batches():
    train_group(model, optimizer, batch)

task.report(
    [model.in_layer.kernel[...], model.out_layer.kernel[...]],
    counts=ja.counts(optimizer.opt_state),
    calls=int(optimizer.step[...]),
)
