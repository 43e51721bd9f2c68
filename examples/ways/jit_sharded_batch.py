"""`jax.jit` with a batch sharded over 8 devices."""

import functools

import jax
import numpy as np
import task
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_accum as ja

MICROBATCHES = 2
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
rows = NamedSharding(mesh, PartitionSpec("data"))
same = NamedSharding(mesh, PartitionSpec())

# The whole group in one call. The mesh says over which devices the batch is split.
step = ja.make_train_step(task.loss_fn, task.optimizer(), MICROBATCHES, mesh=mesh)
params = jax.device_put(task.init(), same)
opt_state = task.optimizer().init(params)
for batch in task.batches():
    params, opt_state, metrics = step(params, opt_state, jax.device_put(batch, rows))

# A call for each microbatch. jit reduces the gradient in every call: it is global already.
opt = ja.MultiSteps(task.optimizer(), MICROBATCHES)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def call(params, state, batch):
    """One microbatch."""
    grads, tokens = jax.grad(task.mean_loss, has_aux=True)(params, batch)
    return opt.apply(grads, state, params, weight=tokens)


calls = jax.device_put(task.init(), same)
state = opt.init(calls)
for batch in task.batches():
    for microbatch in np.split(np.arange(task.ROWS), MICROBATCHES):
        part = {name: x[microbatch] for name, x in batch.items()}
        calls, state = call(calls, state, jax.device_put(part, rows))

task.report(group=params, calls=calls)
