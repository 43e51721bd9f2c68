"""An independent PyTorch reference of gradient accumulation; it never imports JAX.

Import from the modules; each stands for a few facts and is readable in one sitting:

- `torch_ref.models`: a small GPT
- `torch_ref.losses`: losses as a sum and a weight
- `torch_ref.gradients`: sums of gradients, norm, clipping, NumPy copies
- `torch_ref.accumulate`: the gradient of a group
- `torch_ref.unchanged`: no parameter changes inside a group
- `torch_ref.train`: one update per group, counted
- `torch_ref.amp`: loss scaling and autocast
- `torch_ref.replicas`: DistributedDataParallel, one reduction per update
- `torch_ref.launch`: processes on this machine, bounded in time
- `torch_ref.memory`: what a group needs at its peak
- `torch_ref.undivided`: the whole batch at once, to judge the others by
"""
