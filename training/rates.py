"""Default learning rates and warm-up. docs/recipe.md has the measurements behind the numbers."""


class Default(float):
    """A value that is not typed: a resumed run replaces it with the value that it began with."""


# The defaults of a run that starts from existing weights.
FROM_WEIGHTS = {
    "learning_rate": Default(5e-4),
    "embedding_lr_factor": Default(1),
    "output_lr_factor": Default(1),
    "warmup_fraction": Default(0.05),
}


def default_rates(optimizer: str, dim: int, tied: bool) -> dict[str, Default]:
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
        "learning_rate": Default(f"{rate:.2g}"),
        "embedding_lr_factor": Default(embedding),
        "output_lr_factor": Default(output),
        "warmup_fraction": Default(warmup),
    }
