import os

import pytest
from conftest import REPOSITORY

from common.errors import UsageError
from training.arguments import TrainingArguments
from training.engine.environment import name_configuration, take_launch

OURS = str(REPOSITORY / "ds_config.json")
NAMED = TrainingArguments(deepspeed=OURS)


@pytest.fixture(autouse=True)
def environ(monkeypatch) -> dict:
    """Empty; restored after the test."""
    monkeypatch.setattr(os, "environ", {})
    return os.environ


def deepspeed_launch(rank: int) -> dict[str, str]:
    """What DeepSpeed's launcher sets (deepspeed/launcher/launch.py)."""
    return {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        **{"CROSS_RANK": "0", "CROSS_SIZE": "1"},
    }


def told(environ: dict[str, str]) -> dict[str, str]:
    """Without what pytest adds."""
    return {name: value for name, value in environ.items() if not name.startswith("PYTEST")}


def test_nothing_is_made_of_a_launch_without_deepspeed(environ):
    take_launch(TrainingArguments())
    assert told(environ) == {}


def test_the_flag_says_what_accelerate_launch_would_have_said(environ):
    environ |= deepspeed_launch(1)
    take_launch(NAMED)
    assert told(environ) == deepspeed_launch(1) | {
        "LOCAL_WORLD_SIZE": "2",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": OURS,
    }


def test_without_a_launcher_a_process_is_alone(environ):
    take_launch(NAMED)
    assert environ["RANK"] == environ["LOCAL_RANK"] == "0"
    assert environ["WORLD_SIZE"] == environ["LOCAL_WORLD_SIZE"] == "1"
    assert {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys()


@pytest.mark.parametrize("named", [OURS, os.path.relpath(OURS), "none"])
def test_the_same_file_or_none_of_the_launchers_is_no_contradiction(environ, named):
    environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = named
    name_configuration(NAMED)
    assert environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == OURS


def test_two_files_are_refused_by_name(environ):
    environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = "other.json"
    with pytest.raises(UsageError) as error:
        take_launch(NAMED)
    assert str(error.value) == (
        f"--deepspeed is {OURS}, but the launcher's DeepSpeed file is other.json: name one of them"
    )


def test_of_several_models_each_may_name_a_file_and_the_launchers_is_that_of_the_others(environ):
    environ |= {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": "other.json",
    }
    before = dict(environ)
    take_launch(NAMED, TrainingArguments(), TrainingArguments(deepspeed="third.json"))
    assert {name: environ[name] for name in before} == before


def test_several_models_may_bring_deepspeed_to_any_launch(environ):
    take_launch(NAMED, TrainingArguments(deepspeed="other.json"))
    assert environ["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert "ACCELERATE_DEEPSPEED_CONFIG_FILE" not in environ
    assert environ["WORLD_SIZE"] == "1"


def test_deepspeed_for_some_models_alone_is_refused_by_their_names(environ):
    first = TrainingArguments(deepspeed=OURS, run_name="first")
    with pytest.raises(UsageError, match=r"all models or none: only first and not the launcher"):
        take_launch(first, *(TrainingArguments(run_name=name) for name in ("plain", "last")))
    assert told(environ) == {}
