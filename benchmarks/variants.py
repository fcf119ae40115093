"""Decide between variants of the recipe: bits per byte on some texts, with the noise of the seeds.

    python -m benchmarks.variants --data out/data/chinese_poetry out/data/pydocs --seeds 1 2 \\
        --variants "" "--output_lr_factor 1" "shape=4x256" "data=-8192"

A variant is a string of training flags, added to those of the recipe. It may begin with words that
change the recipe: shape=LAYERSxDIM, optimizer=adamw (AdamW alone), or data=SUFFIX for the folder
DATASUFFIX (the same text with another vocabulary, for example). The first variant is the reference.
A variant with a teacher is distilled: "--teacher RUN --alpha 0.5 --temperature 2". Put a space
before a variant of one word that begins with "-": " --qk_norm". Without the space it would be a
flag of this program.
With --minutes, the speed of 100 steps decides the number of steps of a run, otherwise --steps does.
Each run computes with one thread; --jobs runs go at a time, those of one seed beside each other.
Finished runs are reused.

A difference between two variants counts as shown if 95% of the differences that seeds alone make
are smaller. The seeds' standard deviation is that of the residuals when each variant and each seed
has its own mean. This takes two variants and two seeds; with fewer, the table says so.
"""

import itertools
import math
import os
import re
import shlex
import statistics
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from benchmarks.cli import heading, new_parser, table
from benchmarks.trained import Result, train
from lm.common.errors import UsageError, one_line_errors, stop_in_order
from lm.data.shards import read_description
from lm.launch import recipe
from lm.training import schedule
from lm.training.arguments import DistillationArguments, TrainingArguments, as_words
from model import ConfigError, LMConfig, Transformer

PROGRAM = "benchmarks.variants"
SPEED_STEPS = 100
LEADING = r"shape=[1-9]\d*x[1-9]\d*|optimizer=adamw|data=.+"  # words before a variant's flags
# Quantiles of Student's t: 97.5% of the values for 1, 2, ... degrees of freedom lie below.
T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    with one_line_errors(PROGRAM, UsageError, ConfigError):
        parser = new_parser(PROGRAM, __doc__)
        add = parser.add_argument
        add("--data", nargs="+", required=True, help="folders of prepared data")
        add("--variants", nargs="+", default=[""], help="what to compare; the first: the reference")
        add("--shape", default="3x128", help="LAYERSxDIM of variants without a shape of their own")
        add("--steps", type=int, default=600, help="steps of a run")
        add("--minutes", type=float, help="time of a run, instead of --steps")
        add("--seeds", type=int, nargs="+", default=[1, 2], help="each variant trains with each")
        add("--jobs", type=int, default=2, help="runs at a time")
        args = parser.parse_args(argv)
        for variant in (f"shape={args.shape}", *args.variants):
            split_words(variant)  # report a mistake before the first run
        os.environ["OMP_NUM_THREADS"] = "1"  # for the runs
        print(heading(PROGRAM, argv), flush=True)
        with ThreadPoolExecutor(args.jobs) as pool:
            for data in args.data:
                jobs = itertools.product([data], args.seeds, args.variants)
                results = list(pool.map(lambda job: result_of(args, *job), jobs))
                runs = [results[i :: len(args.variants)] for i in range(len(args.variants))]
                print(f"\n{describe(data, args.variants, runs)}", flush=True)


def split_words(variant: str) -> tuple[dict[str, str], str]:
    """Return what the leading words of a variant change in the recipe, and the variant's flags.
    Raises UsageError for another leading word."""
    words = shlex.split(variant)
    leading = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    for word in leading:
        if not re.fullmatch(LEADING, word):
            known = "shape=LAYERSxDIM, optimizer=adamw or data=SUFFIX"
            raise UsageError(f"a variant begins with flags, {known}, not {word!r}")
    return dict(word.split("=", 1) for word in leading), shlex.join(words[len(leading) :])


def result_of(args: Namespace, data: str, seed: int, variant: str) -> Result:
    """Train a variant on a text, and return its result."""
    changed, flags = split_words(variant)
    folder = Path(data + changed.get("data", ""))
    muon = changed.get("optimizer") != "adamw"
    of_recipe = recipe_flags(folder, changed.get("shape", args.shape), muon)
    stage = TrainingArguments
    if "--teacher" in flags.split():  # a teacher's probabilities need the logits of all pieces
        stage, of_recipe = DistillationArguments, f"{of_recipe} --sampled_softmax 1"

    def trained(kind: str, steps: int) -> Result:
        return train(kind, folder, [of_recipe, f"{flags} --max_steps {steps}"], seed, stage)

    steps = args.steps
    if args.minutes:
        steps = round(60 * args.minutes / trained("speed", SPEED_STEPS).step_seconds)
    return trained("variant", steps)


def recipe_flags(data: Path, shape: str, muon: bool) -> str:
    """Return the recipe's flags for a shape and a text that is read at most twice."""
    n_layers, _, dim = shape.partition("x")
    settings = recipe.shape_settings(int(n_layers), int(dim), {})
    length, pieces = settings["max_seq_len"], read_description(data)["vocab_size"]
    model = candidate(settings, pieces, recipe.BATCH // length)
    sizes = settings["dim"], settings["tie_embeddings"], model.counted
    return " ".join(
        as_words(
            settings
            | recipe.loss_flags(model, pieces, torch.cuda.is_available())
            | schedule.recipe_flags("muon" if muon else "adamw", *sizes)
            | {"batch_size": model.rows}
        )
    )


def candidate(settings: dict, vocab_size: int, rows: int) -> recipe.Candidate:
    """Return the model with these flags, and a micro-batch of `rows` sequences."""
    with torch.device("meta"):
        model = Transformer(LMConfig(**settings, vocab_size=vocab_size))
    length = settings["max_seq_len"]
    flops, uncounted = model.flops_per_token(length), recipe.uncounted_parameters(model.config)
    size = model.num_parameters()
    return recipe.Candidate(settings, size, size - uncounted, flops, length, rows)


def describe(data: str, variants: list[str], runs: list[list[Result]]) -> str:
    """Return the table of a text; runs[i][j] is variant i with seed j."""
    found = np.array([[run.bits_per_byte for run in of_variant] for of_variant in runs])
    rows = [
        {
            Path(data).name: f"`{variant.strip()}`" if variant.strip() else "the recipe",
            "steps": f"{statistics.median(run.steps for run in of_variant):,.0f}",
            "ms per step": f"{1e3 * statistics.median(r.step_seconds for r in of_variant):.0f}",
            "bits per byte, by seed": ", ".join(f"{value:.4f}" for value in values),
            "mean": f"{values.mean():.4f}",
            "against the first": f"{values.mean() - found[0].mean():+.4f}",
        }
        for variant, of_variant, values in zip(variants, runs, found, strict=True)
    ]
    shown = smallest_difference(found)
    too_few = "a difference can only be shown with two variants and two seeds"
    limit = too_few if shown is None else f"differences from {shown:.4f} are shown"
    return f"{table(rows)}\n\n{limit}"


def smallest_difference(found: np.ndarray) -> float | None:
    """Return the smallest difference of two variants' means that their seeds show, at 95%; `found`
    is (variants, seeds). None: too few values."""
    freedom = (found.shape[0] - 1) * (found.shape[1] - 1)
    if not freedom:
        return None
    residuals = found - found.mean(0) - found.mean(1, keepdims=True) + found.mean()
    deviation = math.sqrt(np.sum(residuals**2) / freedom)
    quantile = T_975[freedom - 1] if freedom <= len(T_975) else 2.05
    return quantile * deviation * math.sqrt(2 / found.shape[1])


if __name__ == "__main__":
    main()
