"""Grain as the source of data: its iterator is a stream of examples like any other."""

import grain
import jax.numpy as jnp
import task

import jax_accum as ja


def loss_fn(params, batch):
    """The sum over the supervised rows, and their number."""
    logits = jnp.tanh(batch["x"] @ params[0]) @ params[1]
    return ja.losses.softmax_cross_entropy(logits, batch["y"])


rows = [
    {"x": x, "y": y}
    for batch in task.batches()
    for x, y in zip(batch["x"], batch["y"], strict=True)
]
examples = grain.MapDataset.source(rows).seed(0).to_iter_dataset()

plan = ja.BatchPlan.from_global_batch(task.ROWS, microbatch_size=task.ROWS // task.MICROBATCHES)
tx = ja.guard(task.optimizer())
train_step = ja.make_train_step(loss_fn, tx, None)
params = task.weights()
opt_state = tx.init(params)
stream = ja.groups(iter(examples), plan, batched=False, padding={"y": -100})
for group in stream:
    params, opt_state, metrics = train_step(params, opt_state, group.batch, examples=group.examples)

task.report(params, counts=ja.counts(opt_state), dropped=stream.dropped.examples)
