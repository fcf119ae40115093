"""The base that adapters are added to, in the run's own folder."""

from collections import ChainMap
from pathlib import Path

import pytest
import torch
from small_model import adapted

from common.errors import UsageError
from model.lora import Merged, is_adapter
from runs.base import write_base
from runs.checkpoint import OPTIMIZER, RANDOM, WEIGHTS, damage, write_checkpoint
from runs.folder import RunFolder
from runs.weights import WeightsFolder
from training.arguments import TrainingArguments
from training.resume import find_starting_point, starting_weights


@pytest.fixture
def model():
    return adapted(only_lora=False)


@pytest.fixture
def base(model) -> dict:
    """Another model's: what was trained is not in it."""
    return {n: p.detach() + 1 for n, p in model.named_parameters() if not is_adapter(n)}


@pytest.fixture
def run(model, base, tmp_path) -> RunFolder:
    """A run under way, with a checkpoint."""
    run = RunFolder(tmp_path / "runs" / "mine")
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_bytes(b"of no matter")
    write_base(run, model.config, base, tokenizer)
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    state = {"step": 3, "processes": 1, "optimizer_step": 3, "identity": {}}
    state |= {"model": model.config.to_dict(), "lora": vars(model.lora)}
    write_checkpoint(run, {WEIGHTS: trained, OPTIMIZER: {}, RANDOM: {}}, state)
    return run


def test_a_checkpoint_is_read_with_its_adapters_added_to_the_base(run, model, base):
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    expected = dict(Merged(ChainMap(trained, base), model.lora.scaling))
    for name in (run.path, run.checkpoint(3)):
        folder = WeightsFolder.find(str(name))
        loaded = dict(folder.load().named_parameters())
        assert loaded.keys() == expected.keys() == set(folder.tensors())
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_a_checkpoint_whose_base_is_not_as_it_was_is_damaged(run):
    assert damage(run.checkpoint(3)) is None
    file = run.base / "model.safetensors"
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    file.write_bytes(contents)
    problem = damage(run.checkpoint(3))
    assert f"{run.base}: the checksum of model.safetensors is" in problem
    assert "\n" not in problem
    with pytest.raises(UsageError, match=r"every checkpoint .* is damaged"):
        WeightsFolder.find(str(run.path))


def test_a_disk_that_refuses_is_one_line(run, model, base, monkeypatch, tmp_path):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("runs.base.save_portable", full)
    with pytest.raises(UsageError, match="base cannot be written: No space left on device"):
        write_base(run, model.config, base, tmp_path / "tokenizer.model")
    assert damage(run.checkpoint(3)) is None  # what was there still is


def test_a_run_that_goes_on_takes_its_own_base(run):
    def weights(**flags) -> str | None:
        args = TrainingArguments(out_dir=str(run.path.parent), init_from="gone", **flags)
        return starting_weights(args, find_starting_point(args, quiet=True))

    for resume in ("auto", str(run.path), str(run.checkpoint(3))):
        assert Path(weights(resume=resume)).resolve() == run.base.resolve()
    assert weights(run_name="new") == "gone"
    assert weights(resume="auto", run_name="new") == "gone"
    run.base.rename(run.base.with_name("moved"))
    with pytest.raises(UsageError, match="damaged"):
        weights(resume="auto")
