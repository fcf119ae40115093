"""The recipe of run_accelerate.sh chooses a model and a batch for a text, a speed and a time."""

from dataclasses import replace

import pytest

from launch.optimizer_flags import MOST_FOR_RATE, optimizer_flags, repetition_flags, token_noise
from launch.recipe import (
    BATCH,
    EVALUATIONS,
    LEAST_STEPS,
    MIN_STEPS,
    SHAPES,
    Candidate,
    Task,
    choose,
    expected_dim,
    plan_for,
    shape_settings,
)
from model import LMConfig

TEXT = Task(seconds=200, tokens=3.7e6, most_passes=10, validation_tokens=1e5)


def model(n_layers: int, dim: int, **typed: int) -> Candidate:
    settings = shape_settings(n_layers, dim, typed)
    parameters = 6400 * dim + 12 * n_layers * dim**2
    length = settings["max_seq_len"]
    return Candidate(settings, parameters, 6.0 * parameters, length, max(1, 4096 // length))


MODELS = [model(*shape) for shape in SHAPES]


def at(flops: float):
    """Return a function: model → seconds of a step on a machine with this many FLOP/s."""
    return lambda model: model.rows * model.length * model.flops / flops


def test_more_time_or_speed_trains_a_larger_model_on_more_tokens():
    plans = [
        choose(replace(TEXT, seconds=s, tokens=1e12), MODELS, at(2e11)) for s in (50, 800, 1e5)
    ]
    sizes = [plan.model.parameters for plan in plans]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 3
    assert [plan.tokens for plan in plans] == sorted(plan.tokens for plan in plans)
    faster = choose(replace(TEXT, seconds=50, tokens=1e12), MODELS, at(16 * 2e11))
    assert faster.model == plans[1].model


@pytest.mark.parametrize("seconds", [10, 200, 3e3, 1e5, 1e7])
@pytest.mark.parametrize("tokens", [3e6, 1e12])
def test_the_expected_width_is_that_of_the_chosen_model_or_a_neighbour(seconds, tokens):
    plan = choose(replace(TEXT, seconds=seconds, tokens=tokens), MODELS, at(2e11))
    dim, dims = expected_dim(2e11 * seconds, 10 * tokens), sorted({dim for _, dim in SHAPES})
    assert abs(dims.index(dim) - dims.index(plan.model.settings["dim"])) <= 1
    assert expected_dim(2e11 * seconds, 10 * tokens, n_layers=40) <= dim


@pytest.mark.parametrize("first", [0, 4, len(SHAPES) - 1])
def test_the_choice_does_not_depend_on_the_first_guess(first):
    assert choose(TEXT, MODELS, at(2e11), first) == choose(TEXT, MODELS, at(2e11), 3)


def test_the_shortest_runs_train_the_smallest_shapes():
    chosen = []
    for seconds in (40, 80, 150):
        plan = choose(replace(TEXT, seconds=seconds), MODELS, at(2e11))
        chosen.append((plan.model.settings["n_layers"], plan.model.settings["dim"]))
    assert chosen == [(2, 64), (2, 96), (3, 96)]


def test_a_student_is_larger_than_a_model_without_a_teacher_in_the_same_time():
    task = replace(TEXT, seconds=40)
    students = [replace(model, student=True) for model in MODELS]
    with_teacher, without = (choose(task, each, at(2e11)) for each in (students, MODELS))
    assert with_teacher.model.parameters > without.model.parameters


def test_after_a_good_guess_only_the_guess_and_one_neighbour_are_measured():
    asked = []

    def seconds(model: Candidate) -> float:
        asked.append(model)
        return at(2e12)(model)

    best = choose(TEXT, MODELS, at(2e12))
    choose(TEXT, MODELS, seconds, first=MODELS.index(best.model))
    assert len(asked) == 2  # the best and one neighbour


def test_steps_and_validations_fill_the_time():
    plan = plan_for(TEXT, MODELS[1], seconds=0.2)
    training = plan.steps * plan.step_seconds
    validations = EVALUATIONS * TEXT.validation_tokens / 3 / plan.tokens * training  # no backward
    assert training + validations == pytest.approx(TEXT.seconds, rel=0.01)


def test_a_long_run_on_a_small_text_makes_the_maximum_number_of_passes():
    plan = choose(replace(TEXT, seconds=6e5, tokens=3e5), MODELS, at(2e11))
    assert plan.passes == pytest.approx(TEXT.most_passes, rel=0.01)


def test_repeated_tokens_count_in_full_when_the_model_is_chosen():
    texts = [replace(TEXT, seconds=6e5, tokens=tokens, most_passes=15) for tokens in (3.4e5, 5.2e5)]
    dims = [choose(text, MODELS, at(2e11)).model.settings["dim"] for text in texts]
    assert dims == [128, 192]  # the best measured: 1.0 MB of plays, 1.6 MB of source code


@pytest.mark.parametrize(("tokens", "sequences"), [(2e5, None), (3.7e6, None), (2e5, 512)])
@pytest.mark.parametrize("processes", [1, 8, 64])
def test_steps_are_at_least_200_or_have_one_sequence_per_process(tokens, sequences, processes):
    task = replace(TEXT, tokens=tokens, most_passes=15, processes=processes, sequences=sequences)
    plan = choose(task, [replace(model, rows=8 * model.rows) for model in MODELS], at(4e14))
    together = plan.model.rows * plan.model.length * plan.accumulation * processes
    assert plan.steps >= LEAST_STEPS or plan.model.rows == plan.accumulation == 1
    assert plan.tokens == plan.steps * together


def test_a_long_run_has_a_larger_batch():
    short, long = (
        plan_for(replace(TEXT, seconds=s, tokens=1e9), MODELS[1], 0.1) for s in (60, 6000)
    )
    assert (short.accumulation, long.accumulation) == (1, 7)


def test_a_plan_has_a_few_steps_even_if_no_time_is_left():
    assert plan_for(replace(TEXT, seconds=-5), MODELS[1], 0.1).steps == MIN_STEPS


@pytest.mark.parametrize(
    ("typed", "steps", "accumulation"),
    [
        ({"max_steps": 7}, 7, 1),
        ({"epochs": 2}, 1807, 1),
        ({"accumulation_steps": 4, "max_steps": 7}, 7, 4),
    ],
)
def test_typed_steps_epochs_and_accumulation_override_the_plan(typed, steps, accumulation):
    plan = plan_for(replace(TEXT, typed=typed), MODELS[1], 0.2)
    assert (plan.steps, plan.accumulation) == (steps, accumulation)


def test_a_typed_width_gets_heads_that_divide_it():
    assert shape_settings(3, 128, {"dim": 100})["n_heads"] == 2
    assert shape_settings(3, 128, {"dim": 1024, "n_heads": 32})["n_heads"] == 32
    for n_layers, dim in SHAPES:
        LMConfig(**shape_settings(n_layers, dim, {}))


def test_the_output_layer_is_untied_unless_the_flag_is_typed():
    assert shape_settings(3, 128, {})["tie_embeddings"] is False
    assert shape_settings(3, 128, {"tie_embeddings": True})["tie_embeddings"] is True


def test_repeated_text_has_more_weight_decay():
    flags = [repetition_flags(passes, muon=True) for passes in (1, 5, 30)]
    assert [each["weight_decay"] for each in flags] == [0.1, 0.2, 0.5]
    assert [each["muon_momentum"] for each in flags] == [0.9, 0.9, 0.95]
    assert "muon_momentum" not in repetition_flags(30, muon=False)


def test_noise_grows_with_the_passes_over_a_text_in_segmentations():
    assert [token_noise(passes) for passes in (1.5, 6, 15, 30)] == [0.01, 0.04, 0.1, 0.1]


def test_the_rate_beside_muon_grows_with_the_root_of_the_batch_within_limits():
    model = Candidate(shape_settings(8, 512, {}), 26e6, 0, 512, 64)
    batches = (1, BATCH, 4 * BATCH, MOST_FOR_RATE, 10 * MOST_FOR_RATE)
    rates = [optimizer_flags(model, True, batch)["learning_rate"] for batch in batches]
    assert rates == [0.015, 0.015, 0.03, 0.042, 0.042]
    assert len({optimizer_flags(model, False, batch)["learning_rate"] for batch in batches}) == 1
