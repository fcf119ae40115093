"""Who trains: DeepSpeed, DDP or a single process, on which machine."""
