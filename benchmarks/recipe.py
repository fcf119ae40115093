"""Print what the recipe of run_accelerate.sh chooses for several machines, texts and times.

    python -m benchmarks.recipe

Nothing is measured: the speeds of the machines are assumed. benchmarks.variants trains shapes.
"""

import itertools
import math

from benchmarks.cli import heading, new_parser, table
from benchmarks.variants import candidate
from lm.data.prepare import BY_SIZE
from lm.engine.hardware import peak_flops
from lm.launch import recipe
from lm.launch.candidates import FORWARD_SHARE, GPU_SHARE, GPU_TOKENS
from lm.launch.time_budget import MOST_PASSES, MOST_PASSES_SEGMENTED
from lm.training.measurement import Speed

PROGRAM = "benchmarks.recipe"
# Bits per byte = E + A × N^-0.34 + B × D^-0.28 for N million parameters and D million tokens, with
# the exponents of Hoffmann et al., https://arxiv.org/abs/2203.15556. E, A and B are fitted to the
# runs on the built-in text in docs/lab-log.md.
E, A, B = 0.297, 0.306, 0.804
# machine → (GPUs, FLOP/s in training); text → (bytes, bytes per token); minutes
H100 = peak_flops("H100", "bf16") * GPU_SHARE
MACHINES = {
    "2 cores": (0, 0.37e12),  # measured with 3 × 128 on an AMD EPYC with AVX512-bf16
    "RTX 4090": (1, peak_flops("RTX 4090", "bf16") * GPU_SHARE),
    "H100": (1, H100),
    "8 × H100": (8, 8 * H100),
}
TEXTS = {"1 GB": (1e9, 4.0), "10 GB": (1e10, 4.0)}
TIMES = {"10 minutes": 10, "8 hours": 480, "2 days": 2880}


def main(argv: list[str] | None = None) -> None:
    new_parser(PROGRAM, __doc__).parse_args(argv)
    print(f"{heading(PROGRAM, argv)}\n\n{table(choices())}")


def choices() -> list[dict]:
    """Return a row per choice for TEXTS on MACHINES. The formula gives the bits per byte, not for
    texts that are read more than MOST_PASSES times: no run of the fit had so many passes. A larger
    text that changes nothing has no row."""
    rows, ended, chosen = [], set(), set()
    for machine, text, time in itertools.product(MACHINES, TEXTS, TIMES):
        plan, minutes, pieces = planned(*MACHINES[machine], *TEXTS[text], TIMES[time])
        choice = (machine, time, plan.steps, str(plan.model))
        if (machine, text) in ended or choice in chosen:
            continue
        chosen.add(choice)
        if minutes < 0.98 * TIMES[time]:  # the text ends the run: more time changes nothing
            ended.add((machine, text))
            time += f", ends after {minutes:.0f} min" if minutes > 1 else ", ends within a minute"
        model = plan.model
        loss = E + A * (model.counted / 1e6) ** -0.34 + B * (worth(plan) / 1e6) ** -0.28
        rows.append(
            {
                "machine": machine,
                "text": text,
                "time": time,
                "layers × dim": f"{model.settings['n_layers']} × {model.settings['dim']}",
                "vocabulary": f"{pieces:,}",
                "million parameters": f"{model.parameters / 1e6:,.2f}",
                "steps × tokens": f"{plan.steps:,} × {round(plan.tokens / plan.steps):,}",
                "million tokens": f"{plan.tokens / 1e6:,.0f}",
                "passes": f"{plan.passes:.2g}",
                "bits per byte": f"{loss:.2f}" if plan.passes <= MOST_PASSES else "?",
            }
        )
    return rows


def worth(plan: recipe.Plan) -> float:
    """Return how many new tokens teach as much as the plan's tokens (arxiv.org/abs/2305.16264)."""
    repeats = 15.4 * -math.expm1(min(0, 1 - plan.passes) / 15.4)  # pass 17 counts 1/e
    return plan.tokens / max(1, plan.passes) * (1 + repeats)


def planned(
    gpus: int, flops: float, size: float, per_token: float, minutes: float
) -> tuple[recipe.Plan, float, int]:
    """Return the plan for a text of `size` bytes, the minutes that its steps take, and the pieces
    of its vocabulary."""
    defaults = next(each for each in BY_SIZE if size < each.below)
    task = recipe.Task(
        seconds=60 * minutes,
        tokens=size / per_token * (1 - defaults.val_fraction),
        most_passes=MOST_PASSES_SEGMENTED if defaults.segmentations > 1 else MOST_PASSES,
        processes=max(1, gpus),
    )
    models, vocab_size = [], defaults.vocab_size
    for shape in recipe.SHAPES:
        settings = recipe.shape_settings(*shape, {"tie_embeddings": defaults.segmentations > 1})
        rows = (GPU_TOKENS if gpus else recipe.BATCH) // settings["max_seq_len"]
        models.append(candidate(settings, vocab_size, rows))

    def speed(model: recipe.Candidate) -> Speed:
        step = model.rows * model.length * model.flops * task.processes / flops
        return Speed(step, step / model.rows, FORWARD_SHARE * step / model.rows)

    plan = recipe.choose(task, models, speed)
    return plan, plan.seconds / 60, vocab_size


if __name__ == "__main__":
    main()
