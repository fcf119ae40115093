"""Measure which shape trains best in a given time, to check lm/launch/recipe.py.

    python -m benchmarks.recipe --data out/data/builtin --minutes 2 8 --shapes 3x128 3x192
    python -m benchmarks.recipe --choices     # print the recipe's choices for several machines

Each shape first trains for a few steps, to measure its speed, and then for as many steps as fit
into --minutes. Start and validations do not count. The cores must be free. Finished runs are
reused. A formula is fitted to 4 or more runs of a text; out/benchmarks/recipe.png shows the runs.
"""

import itertools
import math
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from benchmarks.cli import heading, new_parser, table
from benchmarks.trained import train
from benchmarks.variants import SPEED_STEPS, candidate
from lm.common.errors import UsageError, one_line_errors, stop_in_order
from lm.data.prepare import BY_SIZE
from lm.data.shards import read_description
from lm.engine.hardware import peak_flops
from lm.launch import recipe
from lm.launch.optimizer_flags import loss_flags, optimizer_flags, repetition_flags
from lm.launch.speed import FORWARD_SHARE, GPU_SHARE
from lm.launch.time_budget import GPU_TOKENS, MOST_PASSES, MOST_PASSES_SEGMENTED
from lm.training.arguments import as_words
from model import ConfigError

PROGRAM = "benchmarks.recipe"
NAMES = {f"{n_layers}x{dim}": (n_layers, dim) for n_layers, dim in recipe.SHAPES}
PICTURE = Path("out/benchmarks/recipe.png")
# Exponents of parameters and tokens: Hoffmann et al., https://arxiv.org/abs/2203.15556.
EXPONENTS = -0.34, -0.28
# E, A and B of `describe_fit` for the built-in text, fitted to the runs in docs/recipe.md.
BUILT_IN = 0.297, 0.306, 0.804
# For --choices: machine → (GPUs, FLOP/s in training); text → (bytes, bytes per token); minutes.
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
    stop_in_order()
    with one_line_errors(PROGRAM, UsageError, ConfigError):
        parser = new_parser(PROGRAM, __doc__)
        add = parser.add_argument
        data = Path("out/data/builtin")
        add("--data", nargs="+", type=Path, default=[data], help="folders of prepared data")
        minutes, shapes = [1, 2, 4, 8, 16], list(NAMES)
        add("--minutes", type=int, nargs="+", default=minutes, help="minutes of training")
        add("--shapes", nargs="+", choices=shapes, default=shapes[:5], help="LAYERSxDIM")
        add("--seeds", type=int, nargs="+", default=[1], help="one run per seed")
        add("--flags", default="", help="more training flags")
        add("--choices", action="store_true", help="train nothing: print what the recipe chooses")
        args = parser.parse_args(argv)
        print(heading(PROGRAM, argv))
        if args.choices:
            print(f"\n{table(choices())}")
            return
        for folder in args.data:
            read_description(folder)
        figure = Figure(figsize=(4 * len(args.data), 4), layout="constrained")
        panels = figure.subplots(1, len(args.data), squeeze=False)[0]
        for folder, axes in zip(args.data, panels, strict=True):
            runs = itertools.product(args.shapes, args.minutes, args.seeds)
            rows = [row(folder, *run, args.flags) for run in runs]
            print(f"\n{table(rows)}")
            if len(rows) > len(BUILT_IN):
                print(f"\n{describe_fit(rows)}")
            draw(axes, rows)
        figure.savefig(PICTURE, dpi=100)


def row(data: Path, name: str, minutes: int, seed: int, more: str) -> dict:
    """Train the shape `name`, with the flags `more`, for `minutes`; return its row of the table."""
    settings = recipe.shape_settings(*NAMES[name], {})
    length, pieces = settings["max_seq_len"], read_description(data)["vocab_size"]
    model = candidate(settings, pieces, recipe.BATCH // length)
    flags = settings | loss_flags(model, pieces, torch.cuda.is_available())
    flags |= optimizer_flags(model, muon=True)
    flags |= repetition_flags(1, muon=True) | {"batch_size": model.rows}
    words = " ".join(as_words(flags))
    speed = train("speed", data, [words, f"{more} --max_steps {SPEED_STEPS}"], seed)
    steps = round(60 * minutes / speed.step_seconds)
    result = train("recipe", data, [words, f"{more} --max_steps {steps}"], seed)
    return {
        "text": data.name,
        "shape": name,
        "minutes": minutes,
        "seed": seed,
        "steps": steps,
        "million tokens": round(steps * recipe.BATCH / 1e6, 2),
        "million parameters": round(model.parameters / 1e6, 3),
        "tokens/s": round(recipe.BATCH / result.step_seconds),
        "bits per byte": round(result.bits_per_byte, 4),
    }


def terms(rows: list[dict]) -> np.ndarray:
    """Return (1, N^-0.34, D^-0.28) of each run, for N million parameters and D million tokens."""
    sizes = np.array([(row["million parameters"], row["million tokens"]) for row in rows])
    return np.column_stack([np.ones(len(rows)), sizes**EXPONENTS])


def describe_fit(rows: list[dict]) -> str:
    """Fit bits per byte = E + A × N^-0.34 + B × D^-0.28 by least squares; describe the result."""
    measured = np.array([row["bits per byte"] for row in rows])
    found = np.linalg.lstsq(terms(rows), measured, rcond=None)[0]
    error = np.sqrt(np.mean((terms(rows) @ found - measured) ** 2))
    values = "E {:.3f}, A {:.3f}, B {:.3f}".format(*found)
    return f"Fit: {values}; root mean square error {error:.4f} bits per byte."


def draw(axes, rows: list[dict]) -> None:
    """Draw the runs of a text, one line per shape."""
    for shape in dict.fromkeys(row["shape"] for row in rows):
        found = sorted(
            (row["million tokens"], row["bits per byte"]) for row in rows if row["shape"] == shape
        )
        axes.plot(*zip(*found, strict=True), marker="o", label=shape)
    axes.set(title=rows[0]["text"], xlabel="million training tokens", ylabel="bits per byte")
    axes.legend()


def choices() -> list[dict]:
    """Return a row per choice for TEXTS on MACHINES. BUILT_IN gives the bits per byte, except for
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
        size = {"million parameters": model.parameters / 1e6, "million tokens": worth(plan) / 1e6}
        loss = f"{(terms([size]) @ BUILT_IN)[0]:.2f}"
        rows.append(
            {
                "machine": machine,
                "text": text,
                "time": time,
                "layers × dim": f"{model.settings['n_layers']} × {model.settings['dim']}",
                "vocabulary": f"{pieces:,}",
                "million parameters": f"{(model.parameters + model.uncounted) / 1e6:,.2f}",
                "steps × tokens": f"{plan.steps:,} × {round(plan.tokens / plan.steps):,}",
                "million tokens": f"{plan.tokens / 1e6:,.0f}",
                "passes": f"{plan.passes:.2g}",
                "bits per byte": loss if plan.passes <= MOST_PASSES else "?",
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

    def speed(model: recipe.Candidate) -> recipe.Speed:
        step = model.rows * model.length * model.flops * task.processes / flops
        return recipe.Speed(step, FORWARD_SHARE * step / model.rows)

    plan = recipe.choose(task, models, speed)
    return plan, plan.steps * plan.step_seconds / 60, vocab_size


if __name__ == "__main__":
    main()
