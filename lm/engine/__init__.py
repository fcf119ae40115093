"""Engines (DeepSpeed, DDP or a single process), and the abilities of the machine."""
