"""Turn text into packed tokens, and read them for training.

Import the modules by name. Preparation must not import torch, which takes seconds.
"""
