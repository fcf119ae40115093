"""Turn text into packed tokens, and read them for training.

This file imports no module, because preparation must not import torch, which takes seconds.
"""
