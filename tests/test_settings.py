import json

import pytest
import torch

from model import LMConfig
from runs.folder import RunFolder
from training.arguments import TrainingArguments
from training.engine.launch import Engine
from training.settings import changed_arguments, saved_arguments, write_settings

ENGINE = "single process, no engine"


@pytest.fixture
def write(tmp_path, accelerator):
    """Writes settings of a model with 32 dimensions into tmp_path; returns its run folder."""

    def write(
        args: TrainingArguments, deepspeed: dict | None = None, tokenizer: str = "elsewhere.model"
    ) -> RunFolder:
        (tmp_path / tokenizer).write_bytes(b"pieces")
        engine = Engine(accelerator, ENGINE, deepspeed)
        run, config = RunFolder(tmp_path), LMConfig(dim=32, n_heads=4)
        write_settings(run, args, config, engine, tmp_path / tokenizer)
        return run

    return write


def test_settings_tell_what_was_asked_and_what_ran_it(write):
    args = TrainingArguments(batch_size=3, run_name="mine", time_limit=1.5)
    told = {"zero_optimization": {"stage": 2}, "train_batch_size": 24}
    run = write(args, told)
    assert saved_arguments(run) == vars(args)
    assert run.tokenizer.read_bytes() == b"pieces"
    settings = json.loads(run.settings.read_text(encoding="utf-8"))
    assert settings["model"] == LMConfig(dim=32, n_heads=4).to_dict()
    assert (settings["engine"], settings["processes"]) == (ENGINE, 1)
    assert settings["deepspeed"] == told
    assert settings["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_the_tokenizer_of_another_run_that_was_begun_there_goes(write, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert write(TrainingArguments()).tokenizer.name == "tokenizer.model"
    run = write(TrainingArguments(), tokenizer="other/tokenizer.json")
    assert run.tokenizer.name == "tokenizer.json"
    assert run.tokenizer.read_bytes() == b"pieces"
    run = write(TrainingArguments())
    assert not list(run.path.glob("tokenizer*.json"))


@pytest.mark.parametrize("settings", [None, b"\xff", b"[]", b'{"arguments": 1}'])
def test_settings_that_cannot_be_read_hold_no_arguments(tmp_path, settings):
    run = RunFolder(tmp_path)
    if settings is not None:
        run.settings.write_bytes(settings)
    assert saved_arguments(run) == {}
    assert changed_arguments(run, TrainingArguments(), ENGINE) == []


def test_flags_that_changed_are_told_with_both_values_but_for_those_that_name_the_run(write):
    run = write(TrainingArguments(batch_size=3, learning_rate=1e-3))
    now = TrainingArguments(
        batch_size=4, learning_rate=1e-3, time_limit=2.0, resume="auto", run_name="mine"
    )
    flags = ["--time_limit None → 2.0", "--batch_size 3 → 4"]
    assert changed_arguments(run, now, ENGINE) == flags
    assert changed_arguments(run, now, "DDP") == [*flags, f"engine {ENGINE} → DDP"]
