"""A small convolutional net on scikit-learn's digits, in Flax Linen and in PyTorch: a `Pair`.

Run it with: jax-accum crosscheck --pair examples/pairs/digits.py:pair

Legend: B images, H and W of an image, C channels.
"""

import jax
import numpy as np
import torch
from flax import linen
from sklearn.datasets import load_digits

import jax_accum as ja
from jax_accum.crosscheck import Pair
from jax_accum.crosscheck.layer_maps import conv, dense

ROWS, UPDATES = 32, 3


class Net(linen.Module):
    """Two convolutions, the mean over the image, a head: ``[B, H, W, 1]`` to ``[B, 10]``."""

    @linen.compact
    def __call__(self, image_BxHxWxC):
        """Logits."""
        x = linen.relu(linen.Conv(8, (3, 3), name="conv1")(image_BxHxWxC))
        x = linen.relu(linen.Conv(16, (3, 3), padding="VALID", name="conv2")(x))
        return linen.Dense(10, name="head")(x.mean(axis=(1, 2)))


class TorchNet(torch.nn.Module):
    """The same: ``[B, 1, H, W]`` to ``[B, 10]``."""

    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = torch.nn.Conv2d(8, 16, 3)
        self.head = torch.nn.Linear(16, 10)

    def forward(self, image_BxCxHxW):
        """Logits."""
        x = torch.relu(self.conv1(image_BxCxHxW))
        x = torch.relu(self.conv2(x))
        return self.head(x.mean(dim=(2, 3)))


def batches():
    """Images ``[B, 8, 8, 1]`` between 0 and 1, and their digits ``[B]``, one batch an update."""
    digits = load_digits()
    images = (digits.images / 16)[..., None]
    for i in range(0, ROWS * UPDATES, ROWS):
        yield {"image": images[i : i + ROWS], "digit": digits.target[i : i + ROWS]}


def jax_loss(params, batch):
    """Summed cross entropy, and the number of images."""
    logits = Net().apply({"params": params}, batch["image"])
    return ja.losses.softmax_cross_entropy(logits, batch["digit"])


def torch_loss(module, batch):
    """The same; images with their channel first, as PyTorch wants them."""
    logits = module(batch["image"].permute(0, 3, 1, 2))
    return torch.nn.functional.cross_entropy(logits, batch["digit"], reduction="sum"), len(logits)


def pair():
    """Both models, from weights that are drawn once."""
    weights = Net().init(jax.random.key(0), np.zeros((1, 8, 8, 1), np.float32))["params"]
    return Pair(
        name="digits",
        jax_loss=jax_loss,
        torch_module=TorchNet,
        torch_loss=torch_loss,
        weights=weights,
        rules=[*conv("conv1", "conv1"), *conv("conv2", "conv2"), *dense("head", "head")],
        batches=list(batches()),
        microbatches=(4,),
        optimizers=("adamw",),
    )
