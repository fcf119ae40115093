"""Checkpoints on disk: found sound or named damaged, whatever has happened to their files."""

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from model import ConfigError, LMConfig
from runs.checkpoint import (
    OPTIMIZER,
    RANDOM,
    STATE,
    WEIGHTS,
    damage,
    newest_sound,
    read_state,
    saved_config,
    space_warning,
    write_checkpoint,
)
from runs.folder import RunFolder
from runs.manifest import MANIFEST
from training.checkpointing import prune

CONFIG = LMConfig(dim=48, n_layers=3, n_heads=4, vocab_size=400, dropout=0.25)
IDENTITY = {"data": "1" * 16, "global_batch": 8, "optimizer": "muon"}


def tensors_of(step: int) -> dict[str, dict[str, torch.Tensor]]:
    moments = {"w.exp_avg": torch.zeros(64), "w.exp_avg_sq": torch.ones(64)}
    random_state = {"0.cpu": torch.get_rng_state(), "0.log": torch.zeros(3)}
    return {
        WEIGHTS: {"w": torch.full((64,), float(step))},
        OPTIMIZER: moments,
        RANDOM: random_state,
    }


def state_of(step: int, **changes) -> dict:
    state = {"step": step, "val_loss": None, "model": CONFIG.to_dict(), "identity": IDENTITY}
    return state | {"processes": 1, "optimizer_step": step, "loss_scale": None} | changes


def save(run: RunFolder, *steps: int, keep_last: int = 0, val_losses=None) -> None:
    for step in steps:
        val_loss = (val_losses or {}).get(step)
        write_checkpoint(run, tensors_of(step), state_of(step, val_loss=val_loss))
        prune(run, keep_last)


def steps_of(run: RunFolder) -> list[int]:
    return [int(path.name[5:]) for path in run.all_checkpoints()]


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def flip(path: Path, position: int) -> None:
    contents = bytearray(path.read_bytes())
    contents[position] ^= 1
    path.write_bytes(contents)


def test_what_was_written_is_there_and_sound(run):
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
        assert name == RANDOM or all(torch.equal(written[k], v) for k, v in tensors.items())


def test_the_newest_and_the_best_are_kept(run):
    save(run, 1, 2, 3, 4, 5, keep_last=2, val_losses={1: 3.0, 2: 1.0, 3: 2.0})
    assert steps_of(run) == [2, 4, 5]


def test_zero_keeps_all(run):
    save(run, 1, 2, 3, 4, 5)
    assert steps_of(run) == [1, 2, 3, 4, 5]


def test_a_kill_while_old_checkpoints_go_leaves_none_by_halves(run, monkeypatch):
    """The name goes first; a folder that lost a file in another way harms no save either."""
    save(run, 1, 2, 3)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **options: None)  # killed here
    save(run, 4, keep_last=2)
    assert steps_of(run) == [3, 4]
    monkeypatch.undo()
    (run.checkpoint(3) / "state.json").unlink()
    save(run, 5, 6, keep_last=2)
    assert sorted(p.name for p in run.checkpoints.glob("step-*")) == [
        "step-00000005",
        "step-00000006",
    ]


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(run, monkeypatch):
    save(run, 1)
    with monkeypatch.context() as patch:

        def full(*args, **options):
            raise OSError(28, "No space left on device")

        patch.setattr("runs.checkpoint.save_tensors", full)
        for step in (1, 2):  # the same step anew, and another one
            with pytest.raises(OSError, match="No space left"):
                save(run, step)
    assert [path.name for path in run.checkpoints.glob("step-*")] == ["step-00000001"]
    assert run.latest.read_text() == "step-00000001\n"
    assert damage(run.checkpoint(1)) is None
    save(run, 3)
    assert damage(run.checkpoint(3)) is None


def test_saving_a_step_again_replaces_it(run):
    save(run, 1)
    inode = (run.checkpoint(1) / "state.json").stat().st_ino
    save(run, 1)
    assert damage(run.checkpoint(1)) is None
    assert (run.checkpoint(1) / "state.json").stat().st_ino != inode


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "state.json"])
def test_a_flipped_bit_a_missing_end_and_a_missing_file_are_named(run, name):
    save(run, 1)
    path, whole = run.checkpoint(1) / name, (run.checkpoint(1) / name).read_bytes()
    flip(path, len(whole) // 2)
    assert damage(run.checkpoint(1)) == f"the checksum of {name} is wrong"
    path.write_bytes(whole[:-1])
    assert f"{name} is {len(whole) - 1} bytes long instead of {len(whole)}" in damage(path.parent)
    path.unlink()
    assert name in damage(run.checkpoint(1))


def test_damage_in_2000_ways_is_always_found_and_never_another_error(run, tmp_path):
    save(run, 1)
    dice = random.Random(0)
    whole, copy = run.checkpoint(1), tmp_path / "copy"
    files = sorted(path.name for path in whole.iterdir())
    contents = {name: (whole / name).read_bytes() for name in files}
    shutil.copytree(whole, copy)
    for _ in range(2000):
        name = dice.choice(files)
        data = bytearray(contents[name])
        kind = dice.choice(("flip", "cut", "grow", "replace", "empty"))
        if kind == "flip":
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        elif kind == "cut":
            del data[dice.randrange(len(data)) :]
        elif kind == "grow":
            data += dice.randbytes(dice.randint(1, 9))
        elif kind == "replace":
            data[:] = dice.randbytes(len(data))
        else:
            data.clear()
        (copy / name).write_bytes(data)
        problem = damage(copy)
        # A manifest may change where nothing is written but white space or an unread key.
        if name == "manifest.json" and problem is None:
            files_said = json.loads(data)["files"]
            assert files_said == json.loads(contents[name])["files"]
        else:
            assert problem, (name, kind)
            assert "\n" not in problem
        (copy / name).write_bytes(contents[name])
    assert damage(copy) is None


def test_the_newest_sound_one_is_found_with_what_is_wrong_with_those_after_it(run):
    assert newest_sound(run) == (None, {})
    save(run, 1, 2, 3, 4)
    assert newest_sound(run) == (run.checkpoint(4), {})
    flip(run.checkpoint(4) / WEIGHTS, 300)
    (run.checkpoint(3) / STATE).unlink()
    flip(run.checkpoint(1) / WEIGHTS, 300)  # before it: nobody looks
    sound, problems = newest_sound(run)
    assert sound == run.checkpoint(2)
    assert list(problems) == [run.checkpoint(4), run.checkpoint(3)]
    assert problems[run.checkpoint(4)] == f"the checksum of {WEIGHTS} is wrong"
    assert STATE in problems[run.checkpoint(3)]
    flip(run.checkpoint(2) / WEIGHTS, 300)
    sound, problems = newest_sound(run)
    assert sound is None
    assert list(problems) == [run.checkpoint(step) for step in (4, 3, 2, 1)]


def test_a_state_of_the_old_form_reads_as_one_of_the_new(run):
    """The model's shape stood among the parts of the identity; how it computes was left out."""
    shape = CONFIG.shape()
    old = state_of(5, identity=shape | IDENTITY)
    del old["model"]
    write_checkpoint(run, tensors_of(5), old)
    assert damage(run.checkpoint(5)) is None
    assert read_state(run.checkpoint(5)) == state_of(5, model=shape)
    assert saved_config(run.checkpoint(5)) == LMConfig(**shape)
    assert saved_config(run.checkpoint(5)).shape() == CONFIG.shape()


@pytest.mark.parametrize("form", ["old", "new"])
def test_where_no_optimizer_is_named_it_was_adamw(run, form):
    identity = {key: value for key, value in IDENTITY.items() if key != "optimizer"}
    state = state_of(5, identity=identity)
    if form == "old":
        state["identity"] = state.pop("model") | identity
    write_checkpoint(run, tensors_of(5), state)
    assert read_state(run.checkpoint(5))["identity"] == identity | {"optimizer": "adamw"}


@pytest.mark.parametrize("form", ["old", "new"])
def test_a_field_that_a_checkpoint_does_not_know_has_its_default(run, form):
    """Written before the field came to LMConfig."""
    shape = CONFIG.shape() | {"tie_embeddings": False}
    del shape["rope_theta"]
    state = state_of(5, model=shape)
    if form == "old":
        state["identity"] = state.pop("model") | IDENTITY
    write_checkpoint(run, tensors_of(5), state)
    assert "rope_theta" not in read_state(run.checkpoint(5))["model"]
    assert saved_config(run.checkpoint(5)) == LMConfig(**shape)
    assert saved_config(run.checkpoint(5)).rope_theta == LMConfig.rope_theta


@pytest.mark.parametrize("model", [None, [], 7, {"dim": "48"}, {"dim": 48, "n_heads": 5}])
def test_a_shape_that_cannot_be_built_is_refused_by_the_name_of_the_file(run, model):
    write_checkpoint(run, tensors_of(5), state_of(5, model=model))
    with pytest.raises(ConfigError) as error:
        saved_config(run.checkpoint(5))
    assert str(error.value).startswith(f"{run.checkpoint(5) / STATE}: ")
    assert "\n" not in str(error.value)


def test_what_runs_beside_this_one_have_too_is_kept_until_they_have_a_newer_one(run, tmp_path):
    """Else one that is killed before it has written, or cannot, leaves no step of which all have
    one."""
    other = RunFolder(tmp_path / "other")
    save(run, 1, 2)
    save(other, 1, 2)
    for step in (3, 4):  # the other one does not get this far
        save(run, step)
        prune(run, 1, [other])
        assert steps_of(run) == [2, step]
    save(other, 4)
    prune(other, 1, [run])
    prune(run, 1, [other])
    assert steps_of(run) == steps_of(other) == [4]


@pytest.mark.parametrize(("free", "warned"), [(59_999, True), (60_000, False)])
def test_too_little_room_for_the_checkpoints_is_said_at_start(run, monkeypatch, free, warned):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    warning = space_warning(run.path, n_parameters=1000, keep_last=3)  # five of 12,000 bytes
    assert bool(warning) == warned
    assert not warned or "--keep_last" in warning
