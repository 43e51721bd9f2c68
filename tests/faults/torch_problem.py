"""The same problem in PyTorch: the tagger as a module, and model and optimizer as state."""

import functools
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.faults.problem import RATE, A, make_case  # noqa: F401 (for the faults)

torch.set_num_threads(1)


class Tagger(nn.Module):
    """Two layers, with the weights of the JAX problem."""

    def __init__(self, params):
        super().__init__()
        self.dtype_of = {name: value.dtype for name, value in params.items()}
        for name, value in params.items():
            setattr(self, name, nn.Parameter(tensor(value)))

    def forward(self, x):
        x = x.to(self.w1.dtype)
        return torch.tanh(x @ self.w1 + self.b1) @ self.w2 + self.b2

    def arrays(self):
        """The parameters as NumPy arrays, copies."""
        return {n: array(p.detach(), self.dtype_of[n]) for n, p in self.named_parameters()}

    def gradients(self):
        """Their gradients."""
        return {n: array(p.grad, self.dtype_of[n]) for n, p in self.named_parameters()}


def tensor(value):
    value = np.array(value)
    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.astype(np.float32)).bfloat16()
    return torch.from_numpy(value)


def array(value, dtype):
    return value.float().numpy().astype(dtype, copy=True)


def to_torch(batch):
    return {"x": tensor(batch["x"]), "labels": tensor(batch["labels"]).long()}


def begin(optimizer=None, **more):
    """An `init`: a fresh model and optimizer, and what else the loop keeps."""

    def init(params):
        model = Tagger(params)
        make = optimizer or functools.partial(torch.optim.SGD, lr=RATE)
        return SimpleNamespace(model=model, optimizer=make(model.parameters()), **more)

    return init


def sum_loss(model, batch):
    """Cross entropy summed over supervised positions."""
    logits = model(batch["x"]).float()
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def mean_loss(model, batch):
    """What PyTorch gives by default: the mean over supervised positions of this microbatch."""
    return sum_loss(model, batch) / tokens_in(batch).clamp(min=1)


def tokens_in(batch):
    return (batch["labels"] != -100).sum()


def group_tokens(batches):
    return int(sum(tokens_in(b) for b in batches))


def step(group):
    """Makes `update` of a function that trains one group in place."""

    @functools.wraps(group)
    def update(params, loop, microbatches):
        group(loop, [to_torch(batch) for batch in microbatches])
        return loop.model.arrays(), loop

    return update
