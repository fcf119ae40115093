"""Scores of a trained model on text, conversations and questions, with intervals."""
