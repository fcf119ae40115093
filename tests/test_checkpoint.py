"""Checkpoints on disk: found sound or named damaged, whatever has happened to their files."""

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.errors import UsageError
from runs.checkpoint import (
    Checkpointer,
    damage,
    differences,
    load_checkpoint,
    read_state,
    space_warning,
)
from runs.folder import RunFolder
from training.arguments import TrainingArguments
from training.resume import choose_run, set_aside

IDENTITY = {"dim": 32, "global_batch": 8}


class FakeLog:
    """A TrainingLog that keeps what was said."""

    def __init__(self):
        self.lines = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def state(self) -> torch.Tensor:
        return torch.tensor([1.0, 2.0, 0.0])

    def load_state(self, state: torch.Tensor) -> None:
        self.loaded = state.tolist()


class FakeState:
    """A TrainingState of two numbers."""

    def __init__(self, value: float = 1.0):
        self.accelerator = SimpleNamespace(
            is_main_process=True, num_processes=1, process_index=0, device=torch.device("cpu")
        )
        self.value = value

    def weights(self):
        return {"w": torch.full((64,), self.value)}

    def averages(self):
        return {"w.exp_avg": torch.zeros(64), "w.exp_avg_sq": torch.ones(64)}

    def scalars(self):
        return {"optimizer_step": 3, "loss_scale": None}

    def load(self, weights, averages, scalars, source):
        self.value, self.step = weights["w"][0].item(), scalars["optimizer_step"]


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def save(run: RunFolder, *steps: int, keep_last: int = 0, val_losses=None) -> FakeLog:
    log = FakeLog()
    for step in steps:
        state = FakeState(float(step))
        checkpointer = Checkpointer(run, state, keep_last, IDENTITY, log)
        checkpointer.save(step, (val_losses or {}).get(step))
        checkpointer.wait()
    return log


def choose(run: RunFolder, **flags):
    args = TrainingArguments(out_dir=str(run.path.parent), run_name=run.path.name, **flags)
    return choose_run(args, SimpleNamespace(is_main_process=True, num_processes=1))


def flip(path: Path, position: int) -> None:
    contents = bytearray(path.read_bytes())
    contents[position] ^= 1
    path.write_bytes(contents)


def test_what_was_saved_comes_back(run):
    log = save(run, 5)
    assert log.lines[0].startswith(f"saved {run.checkpoint(5)}: training stalled ")
    assert "MB/s" in log.lines[0]
    assert damage(run.checkpoint(5)) is None
    assert run.latest.read_text() == "step-00000005\n"
    assert read_state(run.checkpoint(5))["identity"] == IDENTITY
    torch.manual_seed(1)
    state, log = FakeState(), FakeLog()
    load_checkpoint(run.checkpoint(5), state, log)
    assert (state.value, state.step, log.loaded) == (5.0, 3, [1.0, 2.0, 0.0])


def test_random_numbers_go_on_where_they_were(run):
    torch.manual_seed(7)
    save(run, 1)
    expected = torch.rand(3)
    load_checkpoint(run.checkpoint(1), FakeState(), FakeLog())
    assert torch.equal(torch.rand(3), expected)


def test_the_newest_and_the_best_are_kept(run):
    save(run, 1, 2, 3, 4, 5, keep_last=2, val_losses={1: 3.0, 2: 1.0, 3: 2.0})
    assert [int(p.name[5:]) for p in run.all_checkpoints()] == [2, 4, 5]


def test_a_kill_while_old_checkpoints_go_leaves_none_by_halves(run, monkeypatch):
    """The name goes first; a folder that lost a file in another way harms no save either."""
    save(run, 1, 2, 3)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **options: None)  # killed here
    save(run, 4, keep_last=2)
    assert [int(p.name[5:]) for p in run.all_checkpoints()] == [3, 4]
    monkeypatch.undo()
    (run.checkpoint(3) / "state.json").unlink()
    log = save(run, 5, 6, keep_last=2)
    assert all(line.startswith("saved") for line in log.lines)
    assert sorted(p.name for p in run.checkpoints.glob("step-*")) == [
        "step-00000005",
        "step-00000006",
    ]


def test_any_failure_of_the_writing_thread_is_reported(run, monkeypatch):
    monkeypatch.setattr("runs.checkpoint._write_manifest", lambda folder: 1 / 0)
    log = save(run, 1)
    assert log.lines[0].startswith("CHECKPOINT NOT SAVED: division by zero")


def test_a_save_that_fails_leaves_the_one_before_and_the_next_one_works(run, monkeypatch):
    save(run, 1)
    with monkeypatch.context() as patch:

        def full(*args, **options):
            raise OSError(28, "No space left on device")

        patch.setattr("runs.checkpoint.save_tensors", full)
        log = save(run, 2)
    assert "CHECKPOINT NOT SAVED: [Errno 28] No space left on device" in log.lines[0]
    assert [path.name for path in run.checkpoints.glob("step-*")] == ["step-00000001"]
    assert run.latest.read_text() == "step-00000001\n"
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


def test_files_that_are_sound_but_foreign_are_one_clear_line(run, tmp_path):
    """Past the manifest, a loader still meets only what it knows how to refuse."""
    save(run, 1)
    dice = random.Random(1)
    names = ("weights.safetensors", "optimizer.safetensors", "random.safetensors", "state.json")
    contents = {name: (run.checkpoint(1) / name).read_bytes() for name in names}
    refused = 0
    for _ in range(500):
        name = dice.choice(names)
        data = bytearray(contents[name])
        for _ in range(dice.randint(1, 4)):
            data[dice.randrange(min(len(data), 200))] = dice.randrange(256)
        (run.checkpoint(1) / name).write_bytes(data)
        try:
            load_checkpoint(run.checkpoint(1), FakeState(), FakeLog())
        except UsageError as error:
            refused += "cannot be used" in str(error)
        (run.checkpoint(1) / name).write_bytes(contents[name])
    assert refused > 100


def test_auto_takes_the_newest_that_is_sound_and_sets_the_damaged_aside(run, capsys):
    save(run, 1, 2, 3)
    flip(run.checkpoint(3) / "weights.safetensors", 300)
    choice = choose(run, resume="auto")
    assert (choice.checkpoint, choice.step) == (run.checkpoint(2), 2)
    set_aside(choice)
    assert f"DAMAGED CHECKPOINT {run.checkpoint(3)}" in capsys.readouterr().out
    assert [path.name for path in run.all_checkpoints()] == ["step-00000001", "step-00000002"]
    assert list(run.checkpoints.glob("step-00000003.aside-*"))


def test_auto_does_not_start_anew_where_everything_is_damaged(run):
    save(run, 1)
    flip(run.checkpoint(1) / "weights.safetensors", 300)
    with pytest.raises(UsageError, match=r"every checkpoint of .* is damaged"):
        choose(run, resume="auto")


def test_a_damaged_checkpoint_that_was_named_is_refused_and_a_sound_one_offered(run):
    save(run, 1, 2)
    flip(run.checkpoint(2) / "optimizer.safetensors", 300)
    with pytest.raises(UsageError) as error:
        choose(run, resume=str(run.path))
    assert "the checksum of optimizer.safetensors is wrong" in str(error.value)
    assert f"the newest sound one is {run.checkpoint(1)}" in str(error.value)


def test_going_back_sets_the_course_not_taken_aside(run):
    save(run, 1, 2, 3)
    run.weights.mkdir()
    choice = choose(run, resume=str(run.checkpoint(1)))
    assert choice.step == 1
    assert len(run.all_checkpoints()) == 3  # a start that is refused later changes nothing
    set_aside(choice)
    assert not run.weights.exists()
    assert [path.name for path in run.all_checkpoints()] == ["step-00000001"]


def test_differences_name_both_sides():
    assert differences({"dim": 1, "a": 2}, {"dim": 1, "a": 3, "b": 4}) == [
        "a: 2 in the checkpoint, 3 now",
        "b: None in the checkpoint, 4 now",
    ]


@pytest.mark.parametrize(("free", "warned"), [(59_999, True), (60_000, False)])
def test_too_little_room_for_the_checkpoints_is_said_at_start(run, monkeypatch, free, warned):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    warning = space_warning(run, n_parameters=1000, keep_last=3)  # five of 12,000 bytes
    assert bool(warning) == warned
    assert not warned or "--keep_last" in warning


def test_the_loss_scale_of_fp16_comes_back():
    """DeepSpeed's scaler, in which a scale that has come down stays down."""
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

    from training.engine.state import TrainingState

    def state(scaler) -> TrainingState:
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.AdamW([parameter])
        parameter.grad = torch.ones(3)
        optimizer.step()
        zero = SimpleNamespace(optimizer=optimizer, loss_scaler=scaler, bit16_groups=[])
        zero.single_partition_of_fp32_groups = []
        zero.round_robin_bit16_groups = zero.round_robin_bit16_offsets = []
        accelerator = SimpleNamespace(
            mixed_precision="fp16",
            process_index=0,
            state=SimpleNamespace(deepspeed_plugin=object()),
            unwrap_model=lambda model: torch.nn.Module(),
        )
        return TrainingState(accelerator, SimpleNamespace(optimizer=zero), None)

    options = {"init_scale": 2.0**16, "scale_window": 1000, "min_scale": 1.0, "delayed_shift": 1}
    options["consecutive_hysteresis"] = False
    used, fresh = (CreateLossScaler(torch.float16, 0, True, options) for _ in range(2))
    used.cur_scale, used.cur_iter, used.last_overflow_iter = 128.0, 70, 69
    saved = json.loads(json.dumps(state(used).scalars()))
    target = state(fresh)
    target.accelerator.unwrap_model = lambda model: SimpleNamespace(
        named_parameters=lambda: iter(()), config=SimpleNamespace(tie_embeddings=False)
    )
    target.load({}, {}, saved, "checkpoint")
    assert (fresh.cur_scale, fresh.cur_iter, fresh.last_overflow_iter) == (128.0, 70, 69)
    assert saved["optimizer_step"] == 1
