"""Score a trained model on text, conversations and questions, with confidence intervals."""
