"""How good a trained model is: scores of text and of questions, with intervals."""
