"""The recipe of run_accelerate.sh chooses a model and a batch for a text, a speed and a time."""

import math
from dataclasses import replace

import pytest

from lm.launch.recipe import (
    EVALUATIONS,
    LEAST_SAMPLES,
    LEAST_STEPS,
    SHAPES,
    VALIDATION_SHARE,
    Candidate,
    Task,
    choose,
    plan_for,
    shape_settings,
    valid_shapes,
)
from lm.training.measurement import Speed
from model import LMConfig

TEXT = Task(seconds=200, tokens=3.7e6, most_passes=10, samples=390)


def model(n_layers: int, dim: int, **typed: int) -> Candidate:
    settings = shape_settings(n_layers, dim, typed)
    parameters = 6400 * dim + 12 * n_layers * dim**2
    length = settings["max_seq_len"]
    rows = max(1, 4096 // length)
    return Candidate(settings, parameters, parameters, 6.0 * parameters, length, rows)


MODELS = [model(*shape) for shape in SHAPES]
SPEED = Speed(0.1, 0.01, 0.002)


def slow(tokens_per_second: float, overhead: float = 0.0):
    """Return a function: model → its speed, if a micro-batch takes `overhead` more seconds."""

    def speed(model: Candidate) -> Speed:
        sample = model.length / tokens_per_second
        one = sample + overhead
        return Speed(model.rows * sample + overhead, one, sample / 3 + overhead / model.rows)

    return speed


def at(flops: float):
    """Return a function: model → its speed on a machine with this many FLOP/s."""
    return lambda model: slow(flops / model.flops)(model)


def test_more_time_or_speed_trains_a_larger_model_on_more_tokens():
    plans = [
        choose(replace(TEXT, seconds=seconds, tokens=1e12), MODELS, at(2e11))
        for seconds in (40, 80, 150, 800, 1e5)
    ]
    sizes = [plan.model.parameters for plan in plans]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 5
    assert sizes[:3] == [model.parameters for model in MODELS[:3]]
    assert [plan.tokens for plan in plans] == sorted(plan.tokens for plan in plans)
    faster = choose(replace(TEXT, seconds=50, tokens=1e12), MODELS, at(16 * 2e11))
    assert faster.model == plans[3].model


def test_a_student_is_larger_than_a_model_without_a_teacher_in_the_same_time():
    task = replace(TEXT, seconds=40)
    tasks = replace(task, has_teacher=True), task
    with_teacher, without = (choose(each, MODELS, at(2e11)) for each in tasks)
    assert with_teacher.model.parameters > without.model.parameters


@pytest.mark.parametrize("flops", [2e9, 2e10, 2e11, 2e12])
@pytest.mark.parametrize("seconds", [4, 50, 200, 3000])
@pytest.mark.parametrize(("samples", "first"), [(0, False), (30, False), (1024, True)])
def test_training_fills_the_time_and_validation_takes_at_most_a_tenth(
    flops, seconds, samples, first
):
    task = replace(TEXT, seconds=seconds, tokens=1e12, samples=samples, validates_first=first)
    plan = choose(task, [MODELS[3]], at(flops))
    sample = at(flops)(plan.model).sample  # seconds of a sequence
    validations = (plan.evaluations + first) * plan.samples * sample
    least = (1 + first) * min(1, samples) * sample  # a sequence each
    assert validations <= max(VALIDATION_SHARE * seconds, least)
    total = plan.seconds + validations
    assert total == pytest.approx(seconds, abs=plan.seconds / plan.steps) or plan.steps == 1


def test_a_slow_machine_validates_fewer_sequences_and_then_fewer_times():
    task = replace(TEXT, samples=1024)
    found = []
    for tokens_per_second in (2e5, 2e4, 1e4, 1e3, 100):
        plan = choose(task, [MODELS[3]], slow(tokens_per_second))
        found.append((plan.evaluations, plan.samples))
    assert found == [(4, 1024), (4, 1024), (4, 585), (3, 78), (1, 23)]
    assert found[3][1] >= LEAST_SAMPLES


def test_flags_decide_how_much_a_run_validates():
    for typed in ({"max_steps": 9}, {"epochs": 1}):
        plan = plan_for(replace(TEXT, typed=typed), MODELS[3], slow(100)(MODELS[3]))
        assert (plan.evaluations, plan.samples) == (EVALUATIONS, TEXT.samples)
    for tokens_per_second, evaluations in ((100, 1), (3500, 2), (1e6, EVALUATIONS)):
        task = replace(TEXT, typed={"eval_samples": 390})
        plan = plan_for(task, MODELS[3], slow(tokens_per_second)(MODELS[3]))
        assert (plan.evaluations, plan.samples) == (evaluations, 390)


@pytest.mark.parametrize("interval", [0, 1, 20, 400, 10**6])
@pytest.mark.parametrize(
    ("tokens_per_second", "typed"),
    [(1000, {}), (20000, {}), (20000, {"eval_samples": 390}), (1000, {"accumulation_steps": 3})],
)
def test_a_typed_interval_decides_the_number_of_validations(interval, typed, tokens_per_second):
    """They have fewer sequences, so that they take a tenth of the time, unless these are typed."""
    task = replace(TEXT, seconds=500, tokens=1e12, typed=typed | {"eval_interval": interval})
    speed = slow(tokens_per_second)
    plan = choose(task, [MODELS[3]], speed)
    needed = math.ceil(plan.steps / interval) if interval else 1
    assert plan.evaluations == pytest.approx(needed, rel=0.12, abs=1)
    spent = needed * plan.samples * speed(plan.model).sample
    if "eval_samples" in typed:
        assert plan.samples == 390
    elif plan.samples > 1:
        assert spent <= 0.11 * task.seconds
    assert plan.seconds + spent == pytest.approx(task.seconds, rel=0.1)


def test_typed_accumulation_does_not_stop_micro_batches_from_becoming_smaller():
    task = replace(TEXT, seconds=220, typed={"accumulation_steps": 4})
    plan = choose(task, [MODELS[3]], slow(2000))
    assert (plan.accumulation, plan.model.rows) == (4, 1)
    assert plan.steps > 150


@pytest.mark.parametrize(("tokens_per_second", "rows"), [(1000, 3), (2000, 7), (20000, 16)])
def test_a_slow_machine_trains_200_steps_of_fewer_sequences(tokens_per_second, rows):
    task = replace(TEXT, seconds=220, samples=1024)
    plan = choose(task, [MODELS[3]], slow(tokens_per_second))
    assert plan.model.rows == rows
    assert plan.steps >= LEAST_STEPS
    assert plan.tokens >= 0.85 * 220 * tokens_per_second


def test_micro_batches_stay_large_where_small_ones_are_hardly_faster():
    """As beside a busy program, where a step waits for its threads, however small it is."""
    task = replace(TEXT, samples=0)
    plan = choose(task, [MODELS[3]], slow(1e5, overhead=2.0))
    assert (plan.model.rows, plan.steps) == (16, 97)
    found = choose(task, [MODELS[3]], slow(5000, overhead=0.4))
    alone = plan_for(task, MODELS[3], slow(5000, overhead=0.4)(MODELS[3]))
    assert found.tokens >= 0.9 * alone.tokens


@pytest.mark.parametrize("tokens_per_second", [300, 3000, 30000, 3e5])
def test_accumulation_is_never_bought_with_smaller_micro_batches(tokens_per_second):
    for tokens in (2e5, 1e8):
        task = replace(TEXT, tokens=tokens, most_passes=3)
        plan = choose(task, [MODELS[3]], slow(tokens_per_second, overhead=0.05))
        assert plan.accumulation == 1 or plan.model.rows == MODELS[3].rows


def test_a_long_run_reads_a_small_text_most_often_and_repeated_tokens_count_in_full():
    texts = [replace(TEXT, seconds=6e5, tokens=tokens, most_passes=15) for tokens in (3.4e5, 5.2e5)]
    plans = [choose(text, MODELS, at(2e11)) for text in texts]
    assert [plan.passes for plan in plans] == pytest.approx([15, 15], rel=0.01)
    dims = [plan.model.settings["dim"] for plan in plans]
    assert dims == [128, 192]  # the best measured: 1.0 MB of plays, 1.6 MB of source code


@pytest.mark.parametrize("tokens", [2e5, 3.7e6])
@pytest.mark.parametrize("processes", [1, 8, 64])
def test_steps_are_at_least_200_or_have_one_sequence_per_process(tokens, processes):
    task = replace(TEXT, tokens=tokens, most_passes=15, processes=processes)
    plan = choose(task, [replace(model, rows=8 * model.rows) for model in MODELS], at(4e14))
    together = plan.model.rows * plan.model.length * plan.accumulation * processes
    assert plan.steps >= LEAST_STEPS or plan.model.rows == plan.accumulation == 1
    assert plan.tokens == plan.steps * together


def test_a_long_run_has_a_larger_batch():
    short, long = (
        plan_for(replace(TEXT, seconds=s, tokens=1e9), MODELS[1], SPEED) for s in (60, 6000)
    )
    assert (short.accumulation, long.accumulation) == (1, 7)


def test_a_plan_has_a_step_even_if_no_time_is_left():
    plan = choose(replace(TEXT, seconds=-5), [MODELS[1]], at(2e11))
    assert (plan.steps, plan.evaluations, plan.samples) == (1, 1, 1)


@pytest.mark.parametrize(
    ("typed", "steps", "accumulation"),
    [
        ({"max_steps": 7}, 7, 1),
        ({"epochs": 2}, 1807, 1),
        ({"accumulation_steps": 4, "max_steps": 7}, 7, 4),
    ],
)
def test_typed_steps_epochs_and_accumulation_override_the_plan(typed, steps, accumulation):
    plan = plan_for(replace(TEXT, typed=typed), MODELS[1], SPEED)
    assert (plan.steps, plan.accumulation) == (steps, accumulation)


def test_typed_widths_and_heads_fit_each_other_and_the_output_layer_is_untied():
    assert shape_settings(3, 128, {"dim": 100})["n_heads"] == 2
    assert shape_settings(3, 128, {"dim": 1024, "n_heads": 32})["n_heads"] == 32
    assert shape_settings(2, 64, {"n_kv_heads": 4})["n_heads"] == 4
    assert valid_shapes({"n_heads": 64})[0]["dim"] == 128
    for shape in SHAPES:
        assert not LMConfig(**shape_settings(*shape, {})).tie_embeddings
    assert shape_settings(3, 128, {"tie_embeddings": True})["tie_embeddings"] is True
