"""All code that trains and uses the model. docs/architecture.md describes the folders."""
