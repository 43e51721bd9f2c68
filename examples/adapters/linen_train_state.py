"""Flax Linen with a `TrainState`: `MultiSteps` as its `tx`, one call per microbatch."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import task
from flax.training.train_state import TrainState

import jax_accum as ja


class Classifier(nn.Module):
    """Two layers, without biases."""

    @nn.compact
    def __call__(self, x):
        """Logits `[rows, 3]` of inputs `[rows, 5]`."""
        x = jnp.tanh(nn.Dense(task.WIDTHS[1], use_bias=False, name="in_layer")(x))
        return nn.Dense(task.WIDTHS[2], use_bias=False, name="out_layer")(x)


class AccumulatingState(TrainState):
    """A `TrainState` whose `apply_gradients` takes the weight of the microbatch.

    `step` counts calls, as it always did: here microbatches. Log `ja.counts(state.opt_state)`.
    """

    def apply_gradients(self, *, grads, **extra):
        """Adds a microbatch; the parameters change where its group ends."""
        params, opt_state = opt.apply(grads, self.opt_state, self.params, **extra)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state)


model = Classifier()
opt = ja.MultiSteps(ja.guard(task.optimizer()), task.MICROBATCHES)


@functools.partial(jax.jit, donate_argnums=0)
def train_microbatch(state, batch):
    """One microbatch, in the memory of the state that it is given."""

    def mean_loss(params):
        logits = state.apply_fn({"params": params}, batch["x"])
        loss = ja.losses.softmax_cross_entropy(logits, batch["y"])
        return loss.mean, loss.weight

    grads, weight = jax.grad(mean_loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, weight=weight, examples=len(batch["y"]))


first, second = task.weights()
params = {"in_layer": {"kernel": first}, "out_layer": {"kernel": second}}
state = AccumulatingState.create(
    apply_fn=model.apply, params=params, tx=opt.gradient_transformation()
)
for batch in task.batches():
    for microbatch in task.microbatches(batch):
        state = train_microbatch(state, microbatch)

trained = [state.params[name]["kernel"] for name in ("in_layer", "out_layer")]
task.report(trained, counts=ja.counts(state.opt_state), calls=int(state.step))
