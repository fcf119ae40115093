"""The verbs of training, for the pages train_*.py; `engine/` is who trains."""
