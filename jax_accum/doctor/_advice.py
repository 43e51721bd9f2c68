"""What each fault is, in one sentence, and what to change."""

from __future__ import annotations

from jax_accum.doctor import _names as f

ADVICE: dict[str, tuple[str, str]] = {
    f.MEAN_OF_MEANS: (
        "Each microbatch's loss was divided by its own weight, and the results averaged as equals.",
        "add up loss sums and weights over the group, and divide once: "
        "jax_accum.MultiSteps(...).update(grads, ..., weight=tokens), or a loss that returns "
        "Weighted in accumulated_value_and_grad; in PyTorch, divide the summed loss by the "
        "group's token count.",
    ),
    f.DIVIDED_TWICE: (
        "The gradient was divided by the number of microbatches after it was a mean already.",
        "divide in one place only: either the loss by A, or the accumulated gradient, and not "
        "where the optimizer wrapper does it too (optax.MultiSteps averages by itself).",
    ),
    f.NOT_DIVIDED: (
        "The accumulated gradient was not divided by the weight of the group.",
        "divide the summed gradient once by the group's whole weight before the optimizer.",
    ),
    f.REPLICA_DENOMINATOR: (
        "Each replica divided by its own weight before the mean over replicas was taken.",
        "sum the weights over all replicas (psum, all_reduce) and divide by that.",
    ),
    f.TIMES_D: (
        "The gradient is too large by the number of replicas.",
        "reduce a gradient with the global denominator by a sum, and a mean by a mean; the "
        "gradient of a psum'd loss is summed already.",
    ),
    f.OVER_D: (
        "The gradient is too small by the number of replicas.",
        "DDP and pmean average over replicas: multiply by their number, or sum, where the loss was "
        "divided by the global weight.",
    ),
    f.LAST: (
        "Only the group's last microbatch reached the optimizer.",
        "add to the gradient instead of overwriting it; clear it once per group, not inside the "
        "loop.",
    ),
    f.FIRST: (
        "Only the group's first microbatch reached the optimizer.",
        "take the gradient of every microbatch: look for an index that stays 0, or a sum that is "
        "thrown away.",
    ),
    f.LOST: (
        "From the second group on, the first microbatch is missing.",
        "clear the gradient before the group's first backward pass, not after it.",
    ),
    f.LEAK: (
        "Gradients of an earlier group are in it: the accumulator was not emptied.",
        "empty the accumulator when a group ends (optimizer.zero_grad(), or begin from zeros).",
    ),
    f.PARTIAL_BY_FULL: (
        "A group with fewer microbatches was divided by the number of a full one.",
        "divide by the weight that really came, not by a constant A.",
    ),
    f.PARTIAL_DROPPED: (
        "A group with fewer microbatches made no update.",
        "end the last group of an epoch with what is there (flush=True in jax_accum.MultiSteps), "
        "or report what was dropped.",
    ),
    f.PARTIAL_CARRIED: (
        "A group with fewer microbatches waited and was completed from the next one.",
        "end the last group of an epoch with what is there (flush=True in jax_accum.MultiSteps).",
    ),
    f.IGNORED_COUNTED: (
        "Positions that are not supervised count as if they were.",
        "divide by the number of supervised labels, and leave ignored ones out of the sum.",
    ),
    f.SHIFT: (
        "Predictions are held against labels one position off.",
        "shift labels in one place only: in the data or in the loss.",
    ),
    f.FIRST_TERM: (
        "A second loss term was divided by the first one's weight.",
        "give each term its own denominator: a dict of Weighted, one by name.",
    ),
    f.CLIP_EACH: (
        "Gradients were clipped before they were added up.",
        "clip once, the finished gradient of the group.",
    ),
    f.CLIP_BEFORE: (
        "The sum was clipped before it was divided, so that the limit is too low.",
        "divide first, then clip.",
    ),
    f.UPDATE_EACH: (
        "The optimizer ran for every microbatch.",
        "call the optimizer once, where the group ends.",
    ),
    f.CUMULATIVE: (
        "The optimizer ran inside the group, on what had been accumulated by then.",
        "call the optimizer once, where the group ends.",
    ),
    f.DECAY_EACH: (
        "Weight decay was applied in every microbatch.",
        "leave weight decay to the optimizer, which runs once per group.",
    ),
    f.RATE_EACH: (
        "The learning rate is read at the number of microbatches instead of updates.",
        "advance the schedule once per update (scheduler.step() after optimizer.step()).",
    ),
    f.BIAS_EACH: (
        "Adam's bias correction counts microbatches.",
        "advance the optimizer's count once per update.",
    ),
    f.EMA_EACH: (
        "The average of the parameters advances in every microbatch.",
        "update the average once, after the optimizer ran.",
    ),
    f.NARROW: (
        "Gradients were added up in a dtype with too few bits.",
        "accumulate in float32 or wider, whatever the dtype of the gradients.",
    ),
    f.SCALE_MOVED: (
        "The loss scale moved inside a group, and one scale was undone for all of it.",
        "keep the scale constant in a group, and adjust it after the update "
        "(in PyTorch: scaler.update() once per group).",
    ),
    f.SKIP_COUNTED: (
        "A group that should change nothing advanced the optimizer.",
        "on a skip, call neither optimizer nor schedule (jax_accum.guard does so).",
    ),
    f.SAME_MASK: (
        "All microbatches of a group drew the same dropout mask.",
        "derive a key for each microbatch (jax.random.fold_in(key, i)).",
    ),
    f.SAME_ROWS: (
        "Every replica worked on the same examples.",
        "shard the data by replica (axis_index, DistributedSampler).",
    ),
    f.NAN_IGNORED: (
        "A microbatch without supervised labels made NaN.",
        "guard the division where it is zero (jax_accum.losses do), and weigh it 0.",
    ),
    f.POISONED: (
        "One group with an inf left NaN behind for good.",
        "check the gradient before the optimizer runs (jax_accum.guard), and start the next "
        "group from zeros, not from zero times what was there.",
    ),
    f.BATCH_STATISTICS: (
        "The loss looks at statistics of the batch (BatchNorm in training mode, in-batch "
        "negatives), so that no way of splitting it is exact.",
        "use a normalisation without batch statistics, or know that the microbatch size is part "
        "of the recipe.",
    ),
}
"""By fault: what it is, and what to change."""
