"""Models that may be trained together, and the steps at which they resume and save together."""

import json
import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import error_of
from test_arguments import parse_arguments
from test_resume_choice import damage_file, make_run

from lm.common.errors import UsageError
from lm.storage.folder import RunFolder, release_locks
from lm.training.arguments import TrainingArguments, build_parser
from lm.training.runs import Runs
from lm.training.schedule import default_rates
from lm.training.set_up import require_the_same_batches
from lm.training.starting_point import find_starting_points
from model import ConfigError, LMConfig
from train_several_accelerate import SeveralArguments, read_models


@pytest.fixture
def models_of(tmp_path):
    """Writes a file of flags for each model; returns each model's arguments and model settings."""

    def models_of(*flags: str, **models: dict | str) -> list[tuple[TrainingArguments, dict]]:
        words = list(flags)
        for name, own in models.items():
            path = tmp_path / f"{name}.json"
            path.write_text(own if isinstance(own, str) else json.dumps(own))
            words += ["--model", str(path)]
        parse_arguments(words, SeveralArguments)  # checks the flags of all models
        return read_models(vars(build_parser(SeveralArguments).parse_args(words)))

    return models_of


def test_a_model_has_the_flags_of_its_file_and_the_shared_flags(models_of):
    first = {"dim": 64, "learning_rate": 1e-3, "tie_embeddings": False, "compile": "off"}
    second = {"run_name": "mine", "n_layers": 3}
    shared = ["--batch_size", "4", "--lr_schedule", "wsd", "--n_layers", "2"]
    first, second = models_of(*shared, first=first, second=second)
    given = {"batch_size": 4, "lr_schedule": "wsd"}
    first_args = TrainingArguments(run_name="first", learning_rate=1e-3, compile="off", **given)
    assert first == (first_args, {"dim": 64, "tie_embeddings": False, "n_layers": 2})
    rates = default_rates("adamw", LMConfig.dim, tied=True)
    assert second == (TrainingArguments(run_name="mine", **rates, **given), {"n_layers": 3})


def test_a_resumed_model_keeps_its_own_flags(models_of, tmp_path):
    for name, rate in (("first", 1e-3), ("second", 2e-3)):
        run = RunFolder(make_run(tmp_path / name, 10))
        saved = {"arguments": {"learning_rate": rate, "batch_size": 4}, "model": {"dim": 64}}
        run.settings.write_text(json.dumps(saved), encoding="utf-8")
    where = ["--out_dir", str(tmp_path), "--resume", "auto"]
    found = models_of(*where, first={}, second={"learning_rate": 3e-3})
    assert [args.learning_rate for args, _ in found] == [1e-3, 3e-3]
    assert [(args.batch_size, model) for args, model in found] == [(4, {"dim": 64})] * 2


@pytest.mark.parametrize(
    ("models", "flags", "keyword"),
    [
        ({}, [], "pass --model FILE once for each model"),
        ({}, ["--model", "missing.json"], "missing.json: No such file or directory"),
        ({"a": {}}, ["--run_name", "x"], "--run_name: give each model its own"),
        ({"a": "[1]"}, [], "a.json: 'list' object has no attribute 'items'"),
        ({"a": "{"}, [], "a.json: Expecting property name"),
        ({"a": {"dim": [1]}}, [], "a.json: argument --dim: invalid int value: '[1]'"),
        ({"a": {"learning_rate": -1}}, [], "a.json: --learning_rate must be positive"),
        ({"a": {}, "b": {"seed": 7}}, [], "b.json: unrecognized arguments: --seed=7"),
        ({"a": {}, "b": {"dtype": "float32"}}, [], "b.json: unrecognized arguments: --dtype"),
        ({"a": {}, "b": {"run_name": "a"}}, [], "two models have the same run_name: a, a"),
        ({"a": {}}, ["--resume", "out/runs/a"], "several models can only use --resume auto"),
        ({"a": {}}, ["--log_with", "wandb"], "several models can only use tensorboard or none"),
    ],
)
def test_files_and_flags_that_cannot_be_used_are_refused(models_of, models, flags, keyword):
    assert keyword in error_of(models_of, *flags, error=(UsageError, ConfigError), **models)


def test_deepspeed_files_decide_one_precision_and_typed_flags_are_not_dropped(models_of, tmp_path):
    def own(name: str, **sections) -> dict:
        path = tmp_path / f"ds-{name}.json"
        path.write_text(json.dumps({"zero_optimization": {"stage": 2}} | sections))
        return {"deepspeed": str(path)}

    decays = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3}}
    no_bf16, linear = own("no", bf16={"enabled": False}), own("linear", scheduler=decays)
    ((args, _),) = models_of(a=linear)
    assert (args.lr_schedule, args.warmup_steps) == ("linear", 3)
    typed = ("--lr_schedule", "cosine")  # although it is the default
    assert "or type --lr_schedule linear" in error_of(models_of, *typed, a=linear)
    assert "the same --dtype" in error_of(models_of, a=no_bf16, b={})
    ((args, _),) = models_of("--dtype", "bfloat16", a=no_bf16)
    assert args.dtype == "bfloat16"  # the engine refuses the contradiction


@pytest.fixture
def resume(tmp_path):
    """Makes each run with checkpoints of its `steps`; returns the steps after which they resume.
    `damaged` is run → the step of a damaged checkpoint."""

    def resume(damaged: dict[str, int] | None = None, **steps: list[int]) -> list[int]:
        for name, own in steps.items():
            make_run(tmp_path / name, *own)
        for name, step in (damaged or {}).items():
            damage_file(tmp_path / name, step)
        flags = {"out_dir": str(tmp_path), "resume": "auto"}
        models = [TrainingArguments(run_name=name, **flags) for name in steps]
        found = find_starting_points(models, claims=True)
        assert [start.folder.path.name for start in found] == [*steps]
        return [start.step for start in found]

    yield resume
    release_locks()


def test_all_models_resume_from_the_newest_step_that_is_undamaged_in_all(resume, capsys):
    assert resume(small=[10, 20, 30], large=[10, 20], other=[5, 10, 20, 40]) == [20] * 3
    assert resume({"b": 2}, a=[1, 2], b=[1, 2]) == [1, 1]
    said = capsys.readouterr().err
    assert re.search(r"DAMAGED CHECKPOINT .*b/.*/step-0+2: the checksum of ", said)
    assert resume(c=[], d=[]) == [0, 0]  # new runs
    for steps in ({"e": [10, 20], "new": []}, {"f": [10], "g": [30]}):
        assert "no step has a checkpoint of every model" in error_of(resume, **steps)
    assert "h/checkpoints/step-00000010 is damaged" in error_of(resume, {"h": 10}, h=[10], i=[10])


@pytest.fixture
def pair(monkeypatch) -> Runs:
    """Stand-ins for two runs that train together. Neither is due to save or asked to stop."""
    runs = Runs(Mock(reason=lambda: None, time_to_save=False))
    runs.all += [Mock(total_steps=9, interrupted=False) for _ in range(2)]
    for run in runs.all:
        run.is_time_to_save.return_value = run.accelerator.is_main_process = False
    monkeypatch.setattr(runs, "in_turn", lambda: iter(runs.all))
    return runs


def test_all_models_save_when_one_is_due_or_a_stop_is_requested(pair, monkeypatch):
    (first, second), saved, noted = pair.all, [], Mock()
    monkeypatch.setattr(pair, "save", saved.append)
    monkeypatch.setattr("lm.training.runs.leave_note", noted)
    pair.end(1)
    second.is_time_to_save.return_value = True
    pair.end(2)
    assert not pair.stopped
    second.is_time_to_save.return_value, pair.stop.reason = False, lambda: "SIGTERM"
    pair.end(4)
    pair.finish()
    assert saved == [2, 4]
    assert first.log.close.call_count == second.log.close.call_count == 1
    noted.assert_called_once_with()


def test_a_failed_save_does_not_cost_the_weights(pair, monkeypatch):
    monkeypatch.setattr(pair, "wait", lambda: False)
    assert "the last checkpoint was not saved" in error_of(pair.finish)
    assert [run.state.weights.call_count for run in pair.all] == [1, 1]


def test_models_that_would_read_different_batches_are_refused_with_the_value_of_each():
    def inputs(name: str, max_seq_len: int = 8, steps: int = 5) -> SimpleNamespace:
        args, config = TrainingArguments(run_name=name), LMConfig(max_seq_len=max_seq_len)
        return SimpleNamespace(args=args, config=config, total_steps=steps)

    require_the_same_batches([inputs("a"), inputs("b")])
    said = error_of(require_the_same_batches, [inputs("a"), inputs("b", max_seq_len=16)])
    assert "the same max_seq_len: a 8, b 16" in said
    said = error_of(require_the_same_batches, [inputs("a"), inputs("b", steps=6)])
    assert "the same number of steps: a 5, b 6" in said
