"""Weights and tokenizers on disk, in this project's form and in those of others."""
