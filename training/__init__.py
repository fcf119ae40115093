"""What the training loop uses that is not its story: arguments, engines, checkpoints, metrics, profiling."""
