"""Crosscheck: the same model, weights and text in JAX and in PyTorch, held against each other."""
