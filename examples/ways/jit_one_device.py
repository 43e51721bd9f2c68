"""Plain `jax.jit` on one device: A microbatches in one call, or one call each."""

import functools

import jax
import task

import jax_accum as ja

MICROBATCHES = 4

# The whole group in one compiled call.
step = ja.make_train_step(task.loss_fn, task.optimizer(), MICROBATCHES)
params = task.init()
opt_state = task.optimizer().init(params)
for batch in task.batches():
    params, opt_state, metrics = step(params, opt_state, batch)

# A call for each microbatch.
opt = ja.MultiSteps(task.optimizer(), MICROBATCHES)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def call(params, state, batch):
    """One microbatch."""
    grads, tokens = jax.grad(task.mean_loss, has_aux=True)(params, batch)
    return opt.apply(grads, state, params, weight=tokens)


calls = task.init()
state = opt.init(calls)
for batch in task.batches():
    for (rows,) in ja.microbatch_rows(task.ROWS, MICROBATCHES):
        calls, state = call(calls, state, {name: x[rows] for name, x in batch.items()})

task.report(group=params, calls=calls)
