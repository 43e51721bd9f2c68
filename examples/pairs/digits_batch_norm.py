"""The same with a batch norm: comparable in eval mode, not in training mode.

Run it with: jax-accum crosscheck --pair examples/pairs/digits_batch_norm.py:in_eval_mode

In eval mode a batch norm uses running statistics: constants, the same arrays on both sides. In
training mode it uses those of the microbatch, so that the gradient depends on how a batch is cut;
and what it puts into the running variance differs: PyTorch the unbiased one, Flax the biased one.
"""

import jax
import numpy as np
import torch
from flax import linen
from sklearn.datasets import load_digits

import jax_accum as ja
from jax_accum.crosscheck import Pair
from jax_accum.crosscheck.layer_maps import batch_norm, conv, dense

ROWS, UPDATES = 32, 2


class Net(linen.Module):
    """A convolution, a batch norm, the mean over the image, a head."""

    training: bool = False

    @linen.compact
    def __call__(self, image_BxHxWxC):
        """Logits ``[B, 10]``."""
        x = linen.Conv(8, (3, 3), padding="VALID", name="conv")(image_BxHxWxC)
        norm = linen.BatchNorm(not self.training, momentum=0.9, epsilon=1e-5, name="norm")
        return linen.Dense(10, name="head")(linen.relu(norm(x)).mean(axis=(1, 2)))


class TorchNet(torch.nn.Module):
    """The same."""

    def __init__(self, statistics):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 8, 3)
        self.norm = torch.nn.BatchNorm2d(8, eps=1e-5, momentum=0.1)
        self.head = torch.nn.Linear(8, 10)
        self.norm.running_mean.copy_(torch.from_numpy(statistics["mean"]))
        self.norm.running_var.copy_(torch.from_numpy(statistics["var"]))

    def forward(self, image_BxCxHxW):
        """Logits ``[B, 10]``."""
        x = torch.relu(self.norm(self.conv(image_BxCxHxW)))
        return self.head(x.mean(dim=(2, 3)))


def make(training):
    """The pair, with statistics as a trained model would have them."""
    model = Net(training)
    image = np.zeros((1, 8, 8, 1), np.float32)
    weights = model.init(jax.random.key(0), image)["params"]
    rng = np.random.default_rng(0)
    statistics = {
        "mean": rng.normal(size=8).astype(np.float32),
        "var": rng.uniform(0.5, 2, 8).astype(np.float32),
    }
    digits = load_digits()
    images = (digits.images / 16)[..., None]

    def jax_loss(params, batch):
        # In the dtype of the run: float32 statistics would make float64 results float32 ones.
        own = {name: array.astype(batch["image"].dtype) for name, array in statistics.items()}
        variables = {"params": params, "batch_stats": {"norm": own}}
        if training:
            logits, _ = model.apply(variables, batch["image"], mutable=["batch_stats"])
        else:
            logits = model.apply(variables, batch["image"])
        return ja.losses.softmax_cross_entropy(logits, batch["digit"])

    def torch_loss(module, batch):
        logits = module(batch["image"].permute(0, 3, 1, 2))
        loss = torch.nn.functional.cross_entropy(logits, batch["digit"], reduction="sum")
        return loss, len(logits)

    return Pair(
        name="digits with a batch norm",
        jax_loss=jax_loss,
        torch_module=lambda: TorchNet(statistics).train(training),
        torch_loss=torch_loss,
        weights=weights,
        rules=[*conv("conv", "conv"), *batch_norm("norm", "norm"), *dense("head", "head")],
        batches=[
            {"image": images[i : i + ROWS], "digit": digits.target[i : i + ROWS]}
            for i in range(0, ROWS * UPDATES, ROWS)
        ],
        microbatches=(2, 4),
        optimizers=("sgd",),
        ways=("inone",),
    )


def in_eval_mode():
    """Comparable: the statistics are constants."""
    return make(training=False)


def in_training_mode():
    """Not comparable, and reported as such."""
    return make(training=True)
