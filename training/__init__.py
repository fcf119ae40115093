"""What the training loop uses and is not its story: arguments, engines, checkpoints, metrics."""
