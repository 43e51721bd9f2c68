"""The numbers of the recipe that both sides follow, each in its own framework's words."""

from __future__ import annotations

SGD_LEARNING_RATE = 0.1

ADAMW_LEARNING_RATE = 4e-3
ADAMW_BETAS = (0.9, 0.95)
ADAMW_EPS = 1e-8
WEIGHT_DECAY = 0.1
MOMENTUM = 0.9

# The exponent of the decay, 1 - t^-0.8, and the size below which squares are not divided by.
ADAFACTOR_LEARNING_RATE = 0.02
ADAFACTOR_DECAY = 0.8
ADAFACTOR_EPS = 1e-15
ADAFACTOR_MIN_RMS = 1e-3
# Below the norm of the first gradients, so that clipping is at work.
CLIP_NORM = 0.5
# A power of two: the warm-up's fractions are exact in every dtype.
WARMUP_UPDATES = 4


def warmup(update: int) -> float:
    """Share of the full learning rate at an update, counted from 0.

    >>> [warmup(update) for update in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return min(1.0, (update + 1) / WARMUP_UPDATES)
