"""A trained model that writes."""
