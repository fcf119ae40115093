"""A run on disk: its folder, lock, checkpoints and weights, and the search for a run."""
