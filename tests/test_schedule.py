import math
from itertools import pairwise

import pytest

from common.errors import UsageError
from training.arguments import parse_arguments
from training.schedule import MAX_DEFAULT_WARMUP, LearningRate, count_steps

PEAK = 4e-4
SCHEDULES = ["cosine", "linear", "constant", "wsd"]


def rates(schedule: str, total: int = 100, warmup: int = 10, **settings) -> list[float]:
    """Of steps 0 (never taken, nan) to the last."""
    rate = LearningRate(PEAK, total, warmup, schedule, **settings)
    return [math.nan, *(rate(step) for step in range(1, total + 1))]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_is_linear_and_reaches_the_peak_at_its_last_step(schedule):
    found = rates(schedule)
    assert found[1:11] == pytest.approx([PEAK * step / 10 for step in range(1, 11)])
    assert found[10] == PEAK


def test_cosine_equals_its_formula():
    found = rates("cosine", 50, 5, min_ratio=0.2)
    for step in range(6, 51):
        wave = 0.5 * (1 + math.cos(math.pi * (step - 5) / 45))
        assert found[step] == pytest.approx(PEAK * (0.2 + 0.8 * wave))
    assert found[50] == pytest.approx(0.2 * PEAK)


def test_linear_falls_by_the_same_at_every_step_and_constant_not_at_all():
    found = rates("linear")
    falls = [a - b for a, b in pairwise(found[10:])]
    assert falls == pytest.approx([PEAK * 0.9 / 90] * 90)
    assert found[100] == pytest.approx(PEAK / 10)
    assert set(rates("constant")[10:]) == {PEAK}


def test_wsd_stays_at_the_peak_and_decays_linearly_over_the_last_fifth():
    found = rates("wsd")
    assert set(found[10:81]) == {PEAK}
    falls = [a - b for a, b in pairwise(found[80:])]
    assert falls == pytest.approx([PEAK * 0.9 / 20] * 20)
    assert found[100] == pytest.approx(PEAK / 10)
    assert set(rates("wsd", decay_fraction=0.0)[10:]) == {PEAK}
    all_of_it = rates("wsd", decay_fraction=1.0)  # begins after the warm-up
    assert all_of_it[10] == PEAK > all_of_it[11]
    assert all_of_it[100] == pytest.approx(PEAK / 10)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("total", [1, 2, 3, 20, 999])
@pytest.mark.parametrize("share", [0, 0.05, 0.5, 1, 2])
def test_the_rate_rises_to_the_peak_and_never_again(schedule, total, share):
    warmup = int(total * share)
    found = rates(schedule, total, warmup)[1:]
    assert 0 < min(found) <= max(found) <= PEAK
    rising, falling = found[:warmup], found[max(0, warmup - 1) :]
    assert rising == sorted(rising)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(falling))
    assert min(falling, default=PEAK) >= PEAK / 10 * (1 - 1e-12)


def from_flags(typed: str, total_steps: int) -> LearningRate:
    return LearningRate.from_arguments(parse_arguments(typed.split())[0], total_steps)


def test_flags_reach_the_schedule():
    flags = (
        "--learning_rate 3e-3 --lr_schedule wsd --warmup_steps 7 --min_lr_ratio 0.5 "
        "--decay_fraction 0.3"
    )
    assert from_flags(flags, 100) == LearningRate(3e-3, 100, 7, "wsd", 0.5, 0.3)
    assert from_flags("", 100).schedule == "cosine"
    with pytest.raises(UsageError, match="--warmup_steps 11: the whole run has 10 steps"):
        from_flags("--warmup_steps 11", 10)


@pytest.mark.parametrize(
    ("typed", "total_steps", "warmup_steps"),
    [
        ("", 19, 0),
        ("", 20, 1),
        ("", 10**6, MAX_DEFAULT_WARMUP),
        ("--warmup_steps 0", 1000, 0),
        ("--warmup_steps 10", 10, 10),
    ],
)
def test_warm_up_is_what_was_asked_or_a_twentieth_of_all_steps(typed, total_steps, warmup_steps):
    assert from_flags(typed, total_steps).warmup_steps == warmup_steps


@pytest.mark.parametrize(
    ("typed", "steps"), [("--epochs 3", 38), ("--epochs 3 --max_steps 5", 5), ("--epochs 4", 50)]
)
def test_steps_are_those_of_the_epochs_rounded_up(typed, steps):
    args, _ = parse_arguments(f"{typed} --batch_size 2 --accumulation_steps 2".split())
    assert count_steps(args, n_samples=100, processes=2) == steps
