import math
from itertools import pairwise

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD

from training.arguments import parse_arguments
from training.schedule import MAX_DEFAULT_WARMUP, LearningRate

PEAK = 4e-4
SCHEDULES = ["cosine", "linear", "constant", "wsd"]
SIZES = [1, 2, 3, 7, 20, 100, 999, 5000]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_is_linear_and_reaches_the_peak_at_its_last_step(schedule):
    rate = LearningRate(PEAK, total_steps=100, warmup_steps=10, schedule=schedule)
    assert [rate(step) for step in range(1, 11)] == pytest.approx(
        [PEAK * step / 10 for step in range(1, 11)]
    )
    assert rate(10) == PEAK


def test_cosine_ends_at_a_tenth_of_the_peak():
    rate = LearningRate(PEAK, total_steps=100, warmup_steps=10)
    assert rate(100) == pytest.approx(PEAK / 10)
    assert rate(99) > rate(100)


def test_cosine_is_halfway_down_in_the_middle():
    rate = LearningRate(PEAK, total_steps=110, warmup_steps=10)
    assert rate(60) == pytest.approx(PEAK * (1 + 0.1) / 2)


def test_cosine_equals_its_formula():
    rate = LearningRate(PEAK, total_steps=50, warmup_steps=5, min_ratio=0.2)
    for step in range(6, 51):
        wave = 0.5 * (1 + math.cos(math.pi * (step - 5) / 45))
        assert rate(step) == pytest.approx(PEAK * (0.2 + 0.8 * wave))


def test_linear_falls_by_the_same_at_every_step():
    rate = LearningRate(PEAK, total_steps=100, warmup_steps=10, schedule="linear")
    falls = [rate(step) - rate(step + 1) for step in range(10, 100)]
    assert falls == pytest.approx([PEAK * 0.9 / 90] * 90)
    assert rate(100) == pytest.approx(PEAK / 10)


@pytest.mark.parametrize(
    ("kind", "schedule"), [("WarmupLR", "constant"), ("WarmupDecayLR", "linear")]
)
@pytest.mark.parametrize(("total_steps", "warmup_steps"), [(100, 10), (50, 2), (7, 6)])
def test_the_curve_is_that_of_deepspeeds_scheduler(kind, schedule, total_steps, warmup_steps):
    """A straight warm-up, down to nothing; its engine is behind by two steps."""
    theirs, used = deepspeeds(kind, "linear", total_steps, warmup_steps)
    rate = LearningRate(PEAK, total_steps, warmup_steps, schedule, min_ratio=0)
    ours = [rate(step) for step in range(1, total_steps + 1)]
    assert ours == pytest.approx(theirs[1:])
    assert used[:2] == [0, 0]
    assert used[2:] == pytest.approx(ours[: total_steps - 2])


def test_what_deepspeed_calls_log_is_half_way_up_at_the_square_root_of_the_warm_up():
    theirs, _ = deepspeeds("WarmupLR", "log", total_steps=100, warmup_steps=64)
    assert theirs[7] == pytest.approx(PEAK / 2)
    assert theirs[63] == pytest.approx(PEAK)


def deepspeeds(kind: str, warmup_type: str, total_steps: int, warmup_steps: int):
    """Its rates of iterations 0 to the last, and those with which its engine makes the steps."""
    from deepspeed.runtime import lr_schedules

    optimizer = SGD([Parameter(torch.zeros(1))], lr=PEAK)
    total = {"total_num_steps": total_steps} if kind == "WarmupDecayLR" else {}
    scheduler = getattr(lr_schedules, kind)(
        optimizer,
        warmup_max_lr=PEAK,
        warmup_num_steps=warmup_steps,
        warmup_type=warmup_type,
        **total,
    )
    curve, used = [], []
    for _ in range(total_steps):
        used.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    for iteration in range(total_steps + 1):
        scheduler.step(iteration)
        curve += scheduler.get_last_lr()
    return curve, used


def test_constant_stays_at_the_peak():
    rate = LearningRate(PEAK, total_steps=100, warmup_steps=10, schedule="constant")
    assert {rate(step) for step in range(10, 101)} == {PEAK}


def test_wsd_stays_at_the_peak_and_decays_linearly_over_the_last_fifth():
    rate = LearningRate(PEAK, total_steps=100, warmup_steps=10, schedule="wsd")
    assert {rate(step) for step in range(10, 81)} == {PEAK}
    assert rate(90) == pytest.approx(PEAK * (1 + 0.1) / 2)
    assert rate(100) == pytest.approx(PEAK / 10)
    falls = [rate(step) - rate(step + 1) for step in range(80, 100)]
    assert falls == pytest.approx([falls[0]] * 20)


def test_wsd_without_decay_is_constant():
    rate = LearningRate(PEAK, 100, 10, schedule="wsd", decay_fraction=0.0)
    assert {rate(step) for step in range(10, 101)} == {PEAK}


def test_wsd_decaying_over_everything_begins_after_the_warm_up():
    rate = LearningRate(PEAK, 100, 10, schedule="wsd", decay_fraction=1.0)
    assert rate(10) == PEAK
    assert rate(11) < PEAK
    assert rate(100) == pytest.approx(PEAK / 10)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("total_steps", SIZES)
def test_without_warm_up_the_first_step_already_learns(schedule, total_steps):
    rate = LearningRate(PEAK, total_steps, warmup_steps=0, schedule=schedule)
    assert 0 < rate(1) <= PEAK


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_a_run_of_one_step_learns(schedule, warmup_steps):
    rate = LearningRate(PEAK, total_steps=1, warmup_steps=warmup_steps, schedule=schedule)
    assert PEAK / 10 <= rate(1) <= PEAK


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("total_steps", SIZES)
@pytest.mark.parametrize("warmup_share", [0, 0.05, 0.5, 1, 2])
def test_the_rate_rises_to_the_peak_never_above_and_never_rises_again(
    schedule, total_steps, warmup_share
):
    warmup_steps = int(total_steps * warmup_share)
    rate = LearningRate(PEAK, total_steps, warmup_steps, schedule)
    rates = [rate(step) for step in range(1, total_steps + 1)]
    assert 0 < min(rates) <= max(rates) <= PEAK
    rising, falling = rates[:warmup_steps], rates[max(0, warmup_steps - 1) :]
    assert rising == sorted(rising)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(falling))
    assert min(falling, default=PEAK) >= PEAK / 10 * (1 - 1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_past_the_end_keeps_the_final_rate(schedule):
    rate = LearningRate(PEAK, 100, 10, schedule)
    assert rate(150) == pytest.approx(rate(100))


def from_flags(typed: str, total_steps: int) -> LearningRate:
    return LearningRate.from_arguments(parse_arguments(typed.split())[0], total_steps)


@pytest.mark.parametrize(
    ("total_steps", "warmup_steps"),
    [(1, 0), (19, 0), (20, 1), (1000, 50), (10**6, MAX_DEFAULT_WARMUP)],
)
def test_warm_up_is_a_twentieth_of_all_steps_and_at_most_2000(total_steps, warmup_steps):
    assert from_flags("", total_steps).warmup_steps == warmup_steps


def test_flags_reach_the_schedule():
    rate = from_flags(
        "--learning_rate 3e-3 --lr_schedule wsd --warmup_steps 7 --min_lr_ratio 0.5 "
        "--decay_fraction 0.3",
        total_steps=100,
    )
    assert rate == LearningRate(3e-3, 100, 7, "wsd", 0.5, 0.3)


def test_zero_warm_up_asked_for_is_not_the_default():
    assert from_flags("--warmup_steps 0", 1000).warmup_steps == 0
