"""Inside a `jax.shard_map` of your own: sums stay on the device, and are reduced once."""

import jax
import optax
import task
from jax.sharding import AxisType, PartitionSpec

import jax_accum as ja

MICROBATCHES = 2
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
same, rows = PartitionSpec(), PartitionSpec("data")

# The whole group in one call: each device is given its rows, and cuts them itself.
tx = task.optimizer()
value_and_grad = ja.accumulated_value_and_grad(task.loss_fn, MICROBATCHES, axis_name="data")


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(same, same, rows), out_specs=same)
def step(params, opt_state, batch):
    """One update."""
    _, grads = value_and_grad(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


params = task.init()
opt_state = tx.init(params)
for batch in task.batches():
    params, opt_state = step(params, opt_state, batch)

# A call for each microbatch. The accumulators of each device are its own until the group ends.
opt = ja.MultiSteps(task.optimizer(), MICROBATCHES, axis_name="data")
calls = task.init()
state = opt.init(calls, replicas=8)
specs = opt.state_specs(state)


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(same, specs, rows), out_specs=(same, specs))
def call(params, state, batch):
    """One microbatch."""
    own = jax.lax.pcast(params, "data", to="varying")  # or jax.grad reduces in every call
    grads, tokens = jax.grad(task.mean_loss, has_aux=True)(own, batch)
    return opt.apply(grads, state, params, weight=tokens)


for batch in task.batches():
    for microbatch in ja.microbatch_rows(task.ROWS, MICROBATCHES, replicas=8):
        part = {name: x[microbatch.ravel()] for name, x in batch.items()}
        calls, state = call(calls, state, part)

task.report(group=params, calls=calls)
