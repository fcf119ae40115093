"""Checkpoints on disk: `damage` says what is wrong with a checkpoint, and never raises."""

import json
import random
from collections import ChainMap
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from small_model import adapted

from lm.common.errors import UsageError
from lm.storage.checkpoint import (
    MANIFEST,
    OPTIMIZER,
    RANDOM,
    STATE,
    WEIGHTS,
    damage,
    read_state,
    write_base,
    write_checkpoint,
)
from lm.storage.folder import RunFolder
from lm.storage.weights import WeightsFolder
from model import LMConfig
from model.lora import is_adapter, merged_weights

CONFIG = LMConfig(dim=48, n_layers=3, n_heads=4, vocab_size=400, dropout=0.25)
IDENTITY = {"data": "1" * 16, "global_batch": 8, "optimizer": "muon"}


def tensors_of(step: int) -> dict[str, dict[str, torch.Tensor]]:
    moments = {"w.exp_avg": torch.zeros(64), "w.exp_avg_sq": torch.ones(64)}
    weights = {"w": torch.full((64,), float(step))}
    return {WEIGHTS: weights, OPTIMIZER: moments, RANDOM: {"0.cpu": torch.get_rng_state()}}


def state_of(step: int, **changes) -> dict:
    state = {"step": step, "val_loss": None, "model": CONFIG.to_dict(), "identity": IDENTITY}
    return state | {"processes": 1, "optimizer_step": step, "loss_scale": None} | changes


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def test_a_written_checkpoint_is_complete_and_sound(run):
    size = write_checkpoint(run, tensors_of(5), state_of(5))
    path = run.checkpoint(5)
    files = (WEIGHTS, OPTIMIZER, RANDOM, STATE)
    assert sorted(file.name for file in path.iterdir()) == sorted([*files, MANIFEST])
    assert size == sum((path / name).stat().st_size for name in files)
    assert damage(path) is None
    assert run.latest.read_text() == "step-00000005\n"
    assert sorted(file.name for file in run.checkpoints.iterdir()) == ["latest", path.name]
    assert read_state(path) == state_of(5)
    for name, tensors in tensors_of(5).items():
        written = load_file(path / name)
        assert written.keys() == tensors.keys()
        assert all(torch.equal(written[k], v) for k, v in tensors.items())


def test_damage_of_any_file_is_reported_in_one_line(run):
    write_checkpoint(run, tensors_of(1), state_of(1))
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
    state = state_of(3, model=model.config.to_dict(), lora=vars(model.lora))
    write_checkpoint(run, {WEIGHTS: trained, OPTIMIZER: {}, RANDOM: {}}, state)
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
    with pytest.raises(UsageError, match=r"every .* is damaged: .* no readable manifest.json"):
        WeightsFolder.find(str(run.path))
