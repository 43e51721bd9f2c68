"""`jax.pmap` over 8 devices: sums stay on the device, and are reduced once."""

import functools

import jax
import optax
import task

import jax_accum as ja

MICROBATCHES, REPLICAS = 2, 8
replicate = functools.partial(jax.tree.map, lambda x: jax.numpy.stack([x] * REPLICAS))


def by_replica(batch):
    """`[D * n, ...]` to `[D, n, ...]`."""
    return {name: x.reshape(REPLICAS, -1, *x.shape[1:]) for name, x in batch.items()}


# The whole group in one call.
tx = task.optimizer()
value_and_grad = ja.accumulated_value_and_grad(task.loss_fn, MICROBATCHES, axis_name="replica")


@functools.partial(jax.pmap, axis_name="replica")
def step(params, opt_state, batch):
    """One update."""
    _, grads = value_and_grad(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


params = replicate(task.init())
opt_state = replicate(tx.init(task.init()))
for batch in task.batches():
    params, opt_state = step(params, opt_state, by_replica(batch))

# A call for each microbatch.
opt = ja.MultiSteps(task.optimizer(), MICROBATCHES, axis_name="replica")


@functools.partial(jax.pmap, axis_name="replica")
def call(params, state, batch):
    """One microbatch."""
    grads, tokens = jax.grad(task.mean_loss, has_aux=True)(params, batch)
    return opt.apply(grads, state, params, weight=tokens)


calls = replicate(task.init())
state = jax.pmap(opt.init, axis_name="replica")(calls)
for batch in task.batches():
    for rows in ja.microbatch_rows(task.ROWS, MICROBATCHES, replicas=REPLICAS):
        part = {name: x[rows.ravel()] for name, x in batch.items()}
        calls, state = call(calls, state, by_replica(part))

task.report(group=jax.tree.map(lambda x: x[0], params), calls=jax.tree.map(lambda x: x[-1], calls))
