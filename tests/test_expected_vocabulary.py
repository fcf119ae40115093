"""run_accelerate.sh prepares a text for the model that it expects to train, and says when the
vocabulary of the text that is already prepared does not suit the model that it does train."""

import json
import os
import shutil

import pytest
import torch
from conftest import REPOSITORY
from test_preflight import budget_of, pretend

from data.shards import DESCRIPTION_FILE
from launch import preflight, recipe, step_times, time_budget
from launch.preflight import expected_width
from launch.shell_variables import ShellVariables
from training.arguments import build_parser


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.fixture
def width(monkeypatch):
    """Returns the expected width on two cores, for a text of `size` bytes."""
    monkeypatch.setattr(step_times, "available_cores", lambda: 2)
    monkeypatch.setattr(preflight, "find_files", lambda text: [text])

    def width(words: str = "", minutes: float = 4, size: float = 1e12, processes: int = 1) -> int:
        monkeypatch.setattr(preflight, "text_size", lambda files: size)
        typed = vars(build_parser().parse_args(words.split()))
        request = ShellVariables({"MINUTES": str(minutes)}, [])
        return expected_width(request, typed, processes, "my.txt")

    return width


def test_time_and_text_decide_the_expected_width(width):
    assert width(minutes=0.1) < width() < width(minutes=1000)
    assert width(minutes=1000, size=5e6) < width(minutes=1000)
    assert width(processes=2) == width()  # the processes share the cores
    assert width("--dim 48") == 48
    assert width("--n_layers 40") < width()


def test_typed_steps_or_epochs_decide_the_expected_width_instead_of_the_time(width):
    for words in ("--max_steps 1000", "--epochs 3"):
        assert width(words, minutes=0.1, size=1e7) == width(words, minutes=9999, size=1e7)
    steps = [width(f"--max_steps {n}") for n in (10, 1000, 10**6)]
    assert steps == sorted(set(steps))
    assert width("--epochs 1", size=1e7) < width("--epochs 50", size=1e7)
    assert width("--max_steps 1000 --accumulation_steps 64") > steps[1]
    assert width("--max_steps 1000 --batch_size 1") < steps[1]
    assert width("--max_steps 1000 --batch_size 1 --max_seq_len 65536") > steps[1]


def test_the_precision_of_the_run_decides_the_expected_speed(width, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert width("--dtype float32", minutes=30) < width(minutes=30)


def test_the_expected_width_knows_the_precision_of_the_launcher(monkeypatch):
    expected = []
    monkeypatch.setattr(preflight, "expected_width", lambda *args: expected.append(args))
    monkeypatch.setattr(ShellVariables, "data_flags", lambda self, width: width("t") or 1 / 0)
    monkeypatch.setitem(os.environ, "ENGINE", "fp16")
    with pytest.raises(ZeroDivisionError):
        preflight.main([])
    ((_, typed, processes, text),) = expected
    assert (typed["dtype"], processes, text) == ("float16", 1, "t")


@pytest.fixture
def hint(packed, monkeypatch, tmp_path):
    """Returns the hint about the vocabulary in the line "recipe", or "". A model of width `dim` is
    planned for a prepared text of `size` bytes with so many pieces."""

    def hint(dim=128, pieces=4096, size=12e6, flags=(), made=(), environ=()) -> str:
        shutil.copytree(packed, folder := tmp_path / "text", dirs_exist_ok=True)
        about = json.loads((folder / DESCRIPTION_FILE).read_text())
        about["vocab_size"], about["splits"]["train"]["bytes"] = pieces, int(size)
        about["prepared_from"] |= {"vocab_size": None} | dict(made)
        (folder / DESCRIPTION_FILE).write_text(json.dumps(about))
        pretend(monkeypatch, seconds=0.01)
        for name in ("MOST_PASSES", "MOST_PASSES_SEGMENTED"):
            monkeypatch.setattr(time_budget, name, 1e9)
        monkeypatch.setattr(recipe, "SHAPES", ((2, dim),))
        budget = budget_of(["--data", str(folder)], monkeypatch, **dict(environ))
        budget.request.flags = list(flags)
        budget.typed.pop("data")
        task, models = budget.task(), budget.models()
        plan = recipe.choose(task, models, budget.times.assumed)
        said = [s for s in budget.describe(task, models, plan, "").split("; ") if "PREPARE" in s]
        return "".join(said)

    return hint


def test_a_larger_vocabulary_is_named_with_what_to_type(hint):
    says = "a vocabulary of 8,192 would suit it better than 4,096: type PREPARE_FLAGS="
    assert hint() == f"{says}'--vocab_size 8192'"
    flags = {"PREPARE_FLAGS": "--skip_bad_lines"}
    assert hint(environ=flags.items()) == f"{says}'--skip_bad_lines --vocab_size 8192'"
    assert "of 16,384 would" in hint(dim=768, size=60e6, pieces=8192)


@pytest.mark.parametrize(
    "changes",
    [
        {"pieces": 8192, "dim": 768},  # the text is too small for more
        {"pieces": 8192, "size": 60e6},
        {"size": 3.9e6},  # prepared with --segmentations 1
        {"size": 3.9e6 * 20, "made": {"segmentations": 20}},
        {"pieces": 3517},  # the text allows no more
        {"made": {"vocab_size": 4096}},
        {"made": {"tokenizer": "0f" * 32}},
        {"flags": ["--data", "out/data/mine"]},
    ],
)
def test_no_vocabulary_is_named_that_would_not_be_used_or_was_not_asked_for(hint, changes):
    assert hint(**changes) == ""
