"""Who trains: DeepSpeed, DDP or a single process, and what they need to know of the machine."""
