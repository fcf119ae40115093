"""The learning rate: its defaults, its growth with the batch, and the schedule."""

import math
from itertools import pairwise

import pytest
from conftest import error_of
from test_arguments import parse_arguments

from lm.training.arguments import SCHEDULES, TrainingArguments
from lm.training.schedule import (
    BATCH,
    MAX_DEFAULT_WARMUP,
    MOST_FOR_RATE,
    LearningRate,
    recipe_flags,
)

PEAK = 4e-4


def rates(schedule: str, total: int = 100, warmup: int = 10, **settings) -> list[float]:
    """Return the learning rates by step. Steps count from 1; index 0 is nan."""
    settings |= {"lr_schedule": schedule, "learning_rate": PEAK, "warmup_steps": warmup}
    rate = LearningRate(TrainingArguments(**settings), total)
    return [math.nan, *(rate(step) for step in range(1, total + 1))]


@pytest.mark.parametrize(
    ("schedule", "decay_fraction", "start"),
    [
        ("linear", 0.2, 10),
        ("wsd", 0.2, 80),
        ("wsd", 1.0, 10),
        ("wsd", 0.0, 100),
        ("constant", 1, 100),
    ],
)
def test_other_schedules_stay_at_the_peak_and_then_fall_linearly(schedule, decay_fraction, start):
    found = rates(schedule, decay_fraction=decay_fraction)
    assert set(found[10 : start + 1]) == {PEAK}
    falls = [a - b for a, b in pairwise(found[start:])]
    assert falls == pytest.approx([PEAK * 0.9 / max(1, 100 - start)] * (100 - start))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("total", [1, 3, 999])
@pytest.mark.parametrize("share", [0, 0.05, 1])
def test_the_rate_rises_linearly_to_the_peak_and_never_rises_again(schedule, total, share):
    warmup = int(total * share)
    found = rates(schedule, total, warmup)[1:]
    assert 0 < min(found) <= max(found) <= PEAK
    rising, falling = found[:warmup], found[max(0, warmup - 1) :]
    assert rising == pytest.approx([PEAK * i / warmup for i in range(1, len(rising) + 1)])
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(falling))
    assert min(falling, default=PEAK) >= PEAK / 10 * (1 - 1e-12)


def from_flags(typed: str, total_steps: int) -> LearningRate:
    return LearningRate(parse_arguments(typed.split())[0], total_steps)


def test_warm_up_is_a_share_of_the_steps_unless_it_is_typed():
    assert from_flags("", 100).schedule == "cosine"
    for total, warmup in ((3, 0), (4, 1), (60, 15), (10**6, MAX_DEFAULT_WARMUP)):  # 25%, limited
        assert from_flags("", total).warmup_steps == warmup
    for total in range(1, 2000):  # 5%
        assert from_flags("--learning_rate 1e-3", total).warmup_steps == total // 20
    for warmup in (0, 10):
        assert from_flags(f"--warmup_steps {warmup}", 10).warmup_steps == warmup
    said = error_of(from_flags, "--warmup_steps 11", 10)
    assert "--warmup_steps 11: the whole run has 10 steps" in said


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_new_model_has_rates_by_its_width_and_existing_weights_small_ones(optimizer):
    def rates(flags: str) -> tuple[float, float, float]:
        args, _ = parse_arguments(["--optimizer", optimizer, *flags.split()])
        return args.learning_rate, args.embedding_lr_factor, args.output_lr_factor

    by_width = [rates(f"--dim {dim} --no-tie_embeddings")[0] for dim in (64, 128, 256, 512)]
    assert by_width == sorted(set(by_width), reverse=True)
    untied, tied = {"adamw": (10, 4), "muon": (3, 0.5)}, {"adamw": (10, 1), "muon": (1, 1)}
    assert rates("--no-tie_embeddings")[1:] == untied[optimizer]
    assert rates("--tie_embeddings")[1:] == tied[optimizer]
    assert rates("--init_from auto") == (5e-4, 1, 1)
    assert rates("--learning_rate 0.1 --no-tie_embeddings") == (0.1, 1, 1)  # as it was typed
    assert rates("--embedding_lr_factor 2 --no-tie_embeddings")[1:] == (2, untied[optimizer][1])

    warmups = [
        parse_arguments(flags.split())[0].warmup_fraction
        for flags in (f"--optimizer {optimizer}", "--learning_rate 0.1", "--init_from auto")
    ]
    assert warmups == [0.25 if optimizer == "adamw" else 0.05, 0.05, 0.05]


def test_the_rate_beside_muon_grows_with_the_root_of_the_batch_within_limits():
    batches = (1, BATCH, 4 * BATCH, MOST_FOR_RATE, 10 * MOST_FOR_RATE)
    rates = [recipe_flags("muon", 512, False, 26e6, n)["learning_rate"] for n in batches]
    assert rates == [0.015, 0.015, 0.03, 0.042, 0.042]
    assert len({recipe_flags("adamw", 512, False, 26e6, n)["learning_rate"] for n in batches}) == 1


def test_repeated_text_has_more_weight_decay():
    many = [recipe_flags("muon", 512, False, 26e6, passes=passes) for passes in (1, 5, 30)]
    assert [flags["weight_decay"] for flags in many] == [0.1, 0.2, 0.5]
    assert [flags["muon_momentum"] for flags in many] == [0.9, 0.9, 0.95]
    assert "muon_momentum" not in recipe_flags("adamw", 512, False, 26e6, passes=30)
