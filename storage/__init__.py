"""A run on disk: its folder, checkpoints, lock and weights, and how a run is found again."""
