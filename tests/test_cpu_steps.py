import os

import pytest
from conftest import REPOSITORY

from training import cpu_steps
from training.arguments import TrainingArguments
from training.cpu_steps import ADAMW, MUON, cpu_flags
from training.engine.estimate import engines
from training.preflight import flags_for_cpu


@pytest.fixture
def text_of(monkeypatch):
    """Lets --data be a text with so many tokens."""

    def text_of(tokens: int, segmentations: int) -> dict:
        described = {"splits": {"train": {"tokens": tokens}}}
        described["prepared_from"] = {"segmentations": segmentations}
        monkeypatch.setattr(cpu_steps, "read_description", lambda data: described)
        return {"data": "anywhere"}

    return text_of


@pytest.mark.parametrize(
    ("tokens", "segmentations", "typed", "steps", "log", "often", "save"),
    [
        (614_400, 1, {}, 600, 20, 100, 200),
        (382_016, 1, {}, 373, 20, 62, 124),
        (9_000, 1, {}, 100, 20, 20, 40),
        (2_216_140, 7, {}, 541, 20, 90, 180),
        (0, 1, {"teacher": "auto"}, 180, 20, 30, 60),
        (9_000, 1, {"max_steps": 10**6}, None, 20, 100, 200),
        (9_000, 1, {"max_steps": 30}, None, 20, 20, 30),
        (9_000, 1, {"max_steps": 1}, None, 1, 1, 1),
        (614_400, 1, {"epochs": 2}, None, 20, 50, 100),
    ],
)
def test_a_small_text_is_read_four_times_and_no_interval_lies_beyond_the_last_step(
    text_of, tokens, segmentations, typed, steps, log, often, save
):
    if tokens:
        typed = typed | text_of(tokens, segmentations)
    expected = {"max_steps": steps} if steps else {}
    expected |= {"log_interval": log, "eval_interval": often, "sample_interval": often}
    assert cpu_flags(typed, takes_muon=False) == expected | {"save_interval": save} | ADAMW


def test_what_was_typed_stays(text_of):
    typed = text_of(9_000, 1) | {"learning_rate": 1e-3, "eval_interval": 7}
    assert cpu_flags(typed, takes_muon=True).keys() == {
        *("max_steps", "log_interval", "sample_interval", "save_interval"),
        *(MUON.keys() - {"learning_rate"}),
    }


@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3", "zero2_offload"])
def test_muon_is_given_to_the_engines_that_take_it(name, monkeypatch, packed):
    monkeypatch.chdir(REPOSITORY)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    monkeypatch.setattr(os, "environ", clean)
    kind = next(kind for kind in engines(dim=192) if kind.config == name)
    flags = ["--data", str(packed), "--dim", "32"]
    found = flags_for_cpu(f"configs/{name}.yaml", "1", flags, TrainingArguments)
    expected = MUON if kind.takes_muon else ADAMW
    assert [f"--{flag}={value}" for flag, value in expected.items()] == found[-len(expected) :]
    assert found[0].startswith("--max_steps=")
