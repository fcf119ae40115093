"""Looking at runs: what they left, as one page or as a picture."""
