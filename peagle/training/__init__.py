"""Drafter training: positions, exact gradients, the training loop and its folder."""
