"""Checkpoints on disk: `damage` says what is wrong with a checkpoint, and never raises."""

import json
import random
from collections import ChainMap
from types import SimpleNamespace

import pytest
import torch
from small_model import adapted

from lm.storage.checkpoint import (
    MANIFEST,
    OPTIMIZER,
    RANDOM,
    STATE,
    WEIGHTS,
    damage,
    write_base,
    write_checkpoint,
)
from lm.storage.folder import RunFolder
from lm.storage.weights import WeightsFolder
from model.lora import is_adapter, merged_weights


def write(run: RunFolder, step: int, weights: dict[str, torch.Tensor], **state) -> int:
    """Write a checkpoint of these weights; return its size in bytes."""
    moments = {"w.exp_avg": torch.zeros(64), "w.exp_avg_sq": torch.ones(64)}
    tensors = {WEIGHTS: weights, OPTIMIZER: moments, RANDOM: {"0.cpu": torch.get_rng_state()}}
    return write_checkpoint(run, tensors, {"step": step, "val_loss": 2.5} | state)


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def test_a_written_checkpoint_is_complete_and_sound(run):
    size = write(run, 5, {"w": torch.ones(64)})
    path = run.checkpoint(5)
    files = (WEIGHTS, OPTIMIZER, RANDOM, STATE)
    assert sorted(file.name for file in path.iterdir()) == sorted([*files, MANIFEST])
    assert size == sum((path / name).stat().st_size for name in files)
    assert damage(path) is None
    assert run.latest.read_text() == "step-00000005\n"
    assert sorted(file.name for file in run.checkpoints.iterdir()) == ["latest", path.name]


def test_damage_of_any_file_is_reported_in_one_line(run):
    write(run, 1, {"w": torch.ones(64)})
    dice, folder = random.Random(0), run.checkpoint(1)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for _ in range(30):
            at = dice.randrange(len(whole))
            flipped = bytearray(whole)
            flipped[at] ^= 1 << dice.randrange(8)
            for data in (flipped, whole[:at], whole + dice.randbytes(3), dice.randbytes(at)):
                path.write_bytes(data)
                problem = damage(folder)
                if path.name == MANIFEST and problem is None:  # only the last line end is cut off
                    assert json.loads(data)["files"] == json.loads(whole)["files"]
                else:
                    assert problem
                    assert path.name in problem or path.name == MANIFEST
                    assert "\n" not in problem
        path.unlink()
        assert path.name in damage(folder)
        path.write_bytes(whole)
    assert damage(folder) is None


@pytest.fixture
def tuned(run, tmp_path) -> SimpleNamespace:
    """A run with adapters. Its base has the weights + 1; its checkpoint only trained tensors."""
    model = adapted(only_lora=False)
    base = {n: p.detach() + 1 for n, p in model.named_parameters() if not is_adapter(n)}
    (tmp_path / "tokenizer.model").write_bytes(b"any bytes")
    write_base(run, model.config, base, tmp_path / "tokenizer.model")
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    write(run, 3, trained, model=model.config.to_dict(), lora=vars(model.lora))
    return SimpleNamespace(model=model, base=base, trained=trained)


def test_a_checkpoint_with_adapters_is_read_with_the_base_of_its_run(run, tuned):
    assert WeightsFolder.find(str(run.base)).tokenizer.read_bytes() == b"any bytes"
    merged = merged_weights(ChainMap(tuned.trained, tuned.base), tuned.model.lora)
    for name in (run.path, run.checkpoint(3)):
        folder = WeightsFolder.find(str(name))
        loaded = dict(folder.load().named_parameters())
        assert loaded.keys() == merged.keys() == set(folder.tensors())
        assert all(torch.equal(loaded[name], merged[name]) for name in merged)


def test_a_checkpoint_whose_base_has_changed_is_damaged(run, tuned):
    assert damage(run.checkpoint(3)) is None
    weights = run.base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"else")
    assert damage(run.checkpoint(3)) == "the checksum of model.safetensors is wrong"
    run.base.rename(run.base.with_name("moved"))
    assert "no readable manifest.json" in damage(run.checkpoint(3))
