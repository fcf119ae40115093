"""Which models may be trained side by side, and the step that they go on from."""

import json
import re
from types import SimpleNamespace

import pytest

from common.errors import UsageError
from model import ConfigError
from runs.folder import RunFolder
from training import several
from training.arguments import TrainingArguments
from training.several import Runs, parse_models, resumed_together


@pytest.fixture
def words(tmp_path):
    """Writes a file for each model; returns the words that name them."""

    def words(**models: dict | str) -> list[str]:
        files = []
        for name, flags in models.items():
            path = tmp_path / f"{name}.json"
            path.write_text(flags if isinstance(flags, str) else json.dumps(flags))
            files += ["--model", str(path)]
        return files

    return words


def test_a_model_has_the_flags_of_its_file_and_those_of_all(words):
    first = {"dim": 64, "learning_rate": 1e-3, "tie_embeddings": False, "compile": "off"}
    files = words(first=first, second={"run_name": "mine", "batch_size": 4, "tf32": False})
    first, second = parse_models([*files, "--batch_size", "4", "--lr_schedule", "wsd"])
    assert (first.args.run_name, second.args.run_name) == ("first", "mine")
    assert (first.args.learning_rate, second.args.learning_rate) == (1e-3, 5e-4)
    assert [model.args.batch_size for model in (first, second)] == [4, 4]
    assert [model.args.lr_schedule for model in (first, second)] == ["wsd", "wsd"]
    assert (first.settings, second.settings) == ({"dim": 64, "tie_embeddings": False}, {})


@pytest.mark.parametrize(
    ("models", "flags", "keyword"),
    [
        ({}, [], "--model"),
        ({"a": {}}, ["--run_name", "x"], "--run_name: each model has one of its own"),
        ({"a": "[1]"}, [], "a.json: needs flags and their values in braces"),
        ({"a": "{"}, [], "a.json: Expecting property name"),
        ({"a": {"dim": [1]}}, [], '"dim" must be one value, not \\[1\\]'),
        ({"a": {"dim": None}}, [], '"dim" must be one value, not null'),
        ({"a": {"nonsense": 1}}, [], "a.json: .*nonsense"),
        ({"a": {"dim": 7}}, [], "a.json: .*dim 7"),
        ({"a": {"learning_rate": -1}}, [], "a.json: --learning_rate must be positive"),
        ({"a": {}, "b": {"seed": 7}}, [], "--seed must be the same for all models, not .42, 7"),
        ({"a": {}, "b": {"dtype": "float32"}}, [], "--dtype must be the same for all models"),
        ({"a": {}, "b": {"run_name": "a"}}, [], "two models have the same run_name, of a, a"),
        ({"a": {}}, ["--resume", "out/runs/a"], "several models take --resume auto"),
        ({"a": {}}, ["--keep_last", "1"], "--keep_last 1: several models need 2"),
        ({"a": {}}, ["--log_with", "wandb"], "several models take tensorboard or none"),
    ],
)
def test_models_that_cannot_be_trained_together_are_refused(words, models, flags, keyword):
    with pytest.raises((UsageError, ConfigError), match=keyword):
        parse_models([*words(**models), *flags])
    with pytest.raises(UsageError, match=r"missing.json: .*No such file"):
        parse_models(["--model", "missing.json"])


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Makes the arguments of models, each with checkpoints after some steps.

    Args:
        damaged: runs and steps whose checkpoint is damaged, such as small/20.
    """

    def make(damaged: tuple = (), resume="auto", **steps: list[int]) -> list[TrainingArguments]:
        def damage(path):
            name = f"{path.parents[1].name}/{int(path.name.removeprefix('step-'))}"
            return "weights.safetensors is not what it was" if name in damaged else None

        monkeypatch.setattr(several, "damage", damage)
        for name, own in steps.items():
            for step in own:
                RunFolder(tmp_path / name).checkpoint(step).mkdir(parents=True)
        where = {"out_dir": str(tmp_path), "resume": resume}
        return [TrainingArguments(run_name=name, **where) for name in steps]

    return make


def steps_of(paths: list[str]) -> list[int]:
    return [int(re.search(r"step-(\d+)$", path)[1]) for path in paths]


def test_all_go_on_from_the_newest_step_that_all_have(models, tmp_path):
    paths = resumed_together(models(small=[10, 20, 30], large=[10, 20], other=[5, 10, 20, 40]))
    assert steps_of(paths) == [20, 20, 20]
    assert paths[1] == str(RunFolder(tmp_path / "large").checkpoint(20))


def test_a_step_of_which_one_is_damaged_is_passed_over_aloud(models, capsys):
    asked = models(small=[10, 20], large=[10, 20], damaged=("large/20",))
    assert steps_of(resumed_together(asked)) == [10, 10]
    said = capsys.readouterr().out
    assert "step-00000020: weights.safetensors is not what it was; trying the step before" in said


@pytest.mark.parametrize("resume", ["auto", None])
def test_where_there_is_no_checkpoint_yet_new_runs_start(models, tmp_path, resume):
    asked = models(small=[], large=[], resume=resume)
    assert resumed_together(asked) == [resume, resume]
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize(
    ("steps", "damaged"),
    [
        ({"small": [10, 20], "new": []}, ()),
        ({"small": [10], "large": [30]}, ()),
        ({"small": [10], "large": [10]}, ("small/10",)),
    ],
)
def test_without_a_step_of_all_they_do_not_go_on(models, steps, damaged):
    with pytest.raises(UsageError, match=r"no step of which all have a sound checkpoint: leave"):
        resumed_together(models(damaged, **steps))


class FakeRun:
    """As much of a Run as `Runs` asks for at the end of a step."""

    def __init__(self, name: str):
        self.engine = SimpleNamespace(is_main=False)
        self.args, self.total_steps = TrainingArguments(), 9
        self.due, self.done = False, []

    def is_time_to_save(self, step: int, val_loss: float | None) -> bool:
        return self.due

    def save(self, step: int, val_loss: float | None) -> None:
        self.done.append((step, val_loss))

    def close(self) -> bool:
        self.done.append("closed")
        return True


def test_all_save_where_it_is_time_for_one_or_to_stop(monkeypatch):
    ended = []
    monkeypatch.setattr(several, "end_stopped", lambda engines, saved: ended.append(saved))
    stop = SimpleNamespace(reason=lambda: None, time_to_save=False, saved=lambda: None)
    first, second = FakeRun("first"), FakeRun("second")
    together = Runs({first: {}, second: {}}, [], stop)
    monkeypatch.setattr(together, "in_turn", lambda: iter(together.all))
    assert not together.end(1, {first: 1.0, second: 2.0})
    second.due = True
    assert not together.end(2, {first: 1.5, second: 2.5})
    assert (first.done, second.done) == ([(2, 1.5)], [(2, 2.5)])
    stop.reason, second.due = lambda: "SIGTERM", False
    assert together.end(4, {first: None, second: None})
    assert first.done[1:] == second.done[1:] == [(4, None), "closed"]
    assert ended == [True]
