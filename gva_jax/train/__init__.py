"""Training: optimiser, state, step, checkpoints, loop."""
