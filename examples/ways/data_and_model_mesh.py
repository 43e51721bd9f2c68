"""A 4 x 2 mesh of data and model axes: D is 4, and tensor parallelism stays automatic."""

import functools

import jax
import task
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_accum as ja

MICROBATCHES = 4
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
rows = NamedSharding(mesh, PartitionSpec("data"))
# The hidden layer is cut in two: columns of the first matrix, rows of the second.
specs = {
    "in": PartitionSpec(None, "model"),
    "out": PartitionSpec("model", None),
    "bias": PartitionSpec(),
}
placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

# The whole group in one call. Of the specs, reduce="each" sees which dimensions are taken.
step = ja.make_train_step(
    task.loss_fn, task.optimizer(), MICROBATCHES, mesh=mesh, reduce="each", param_specs=specs
)
params = jax.device_put(task.init(), placed)
opt_state = task.optimizer().init(params)
for batch in task.batches():
    params, opt_state, metrics = step(params, opt_state, jax.device_put(batch, rows))

# A call for each microbatch, reduced in every call.
opt = ja.MultiSteps(task.optimizer(), MICROBATCHES)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def call(params, state, batch):
    """One microbatch."""
    grads, tokens = jax.grad(task.mean_loss, has_aux=True)(params, batch)
    return opt.apply(grads, state, params, weight=tokens)


calls = jax.device_put(task.init(), placed)
state = opt.init(calls)
for batch in task.batches():
    for microbatch in ja.microbatch_rows(task.ROWS, MICROBATCHES, ja.data_replicas(mesh)):
        part = {name: x[microbatch.ravel()] for name, x in batch.items()}
        calls, state = call(calls, state, jax.device_put(part, rows))

task.report(group=params, calls=calls)
