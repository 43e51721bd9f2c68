"""An independent PyTorch reference of gradient accumulation; it never imports JAX."""
