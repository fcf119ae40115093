"""Default learning rates and warm-up. docs/recipe.md has the measurements behind the numbers."""

# The defaults of a run that starts from existing weights.
FROM_WEIGHTS = {
    "learning_rate": 5e-4,
    "embedding_lr_factor": 1.0,
    "output_lr_factor": 1.0,
    "warmup_fraction": 0.05,
}


def default_rates(optimizer: str, dim: int, tied: bool) -> dict[str, float]:
    """Return the defaults of --learning_rate, --embedding_lr_factor, --output_lr_factor and
    --warmup_fraction for a model with random weights: beside Muon, or for AdamW alone. `tied` means
    that the input embedding and the output layer share one matrix, which then learns as an
    embedding."""
    dim = max(1, dim)  # the model refuses other values
    if optimizer == "muon":
        rate, warmup = (0.02 if tied else 0.03) * (128 / dim) ** 0.5, 0.05
        embedding, output = (1.0, 1.0) if tied else (3.0, 0.5)
    else:
        rate, warmup = 0.0045 * 128 / dim, 0.25
        embedding, output = 10.0, 1.0 if tied else 4.0
    return {
        "learning_rate": float(f"{rate:.2g}"),
        "embedding_lr_factor": embedding,
        "output_lr_factor": output,
        "warmup_fraction": warmup,
    }
