"""Training: packed batches, losses, the step, and what a run needs around it (training.md)."""
