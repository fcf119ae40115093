"""Saving behind training, and what is loaded again; the files themselves are in test_checkpoint."""

import random
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from common.errors import UsageError
from model import LMConfig
from model.lora import LoRA
from runs.checkpoint import damage, read_state, write_checkpoint
from runs.folder import RunFolder
from training import checkpointing
from training.checkpointing import Checkpointer, load_checkpoint, require_same_adapters
from training.engine.launch import Engine

CONFIG = LMConfig(dim=48, n_layers=3, n_heads=4, vocab_size=400)
IDENTITY = {"data": "1" * 16, "global_batch": 8, "optimizer": "adamw"}


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

    model = SimpleNamespace(lora=None)

    def __init__(self, value: float = 1.0):
        self.value = value

    def weights(self):
        return {"w": torch.full((64,), self.value)}

    def moments(self):
        return {"w.exp_avg": torch.zeros(64), "w.exp_avg_sq": torch.ones(64)}

    def scalars(self):
        return {"optimizer_step": 3, "loss_scale": None}

    def load(self, weights, moments, scalars, source):
        self.value, self.step = weights["w"][0].item(), scalars["optimizer_step"]


LORA = LoRA(dim=8, alpha=16.0, module_name="layers", only_lora=True)


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        (
            LORA,
            replace(LORA, dim=4),
            r"^step-1 has other adapters \(LoRA\): dim 8 there and 4 now$",
        ),
        (LORA, replace(LORA, alpha=8.0), "alpha 16.0 there and 8.0 now"),
        (LORA, None, "dim 8 there and None now, alpha 16.0 there and None now, module_name"),
        (None, LORA, "dim None there and 8 now"),
    ],
)
def test_other_adapters_than_the_checkpoints_are_named(saved, now, message):
    with pytest.raises(UsageError, match=message):
        require_same_adapters(saved and vars(saved), now, "step-1")
    require_same_adapters(saved and vars(saved), saved, "step-1")


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def engine_of(processes: int = 1, rank: int = 0) -> Engine:
    accelerator = SimpleNamespace(
        is_main_process=rank == 0,
        num_processes=processes,
        process_index=rank,
        device=torch.device("cpu"),
    )
    return Engine(accelerator, "any engine", deepspeed=None)


def checkpointer_of(
    run: RunFolder, value: float = 1.0, engine: Engine | None = None, **changes
) -> Checkpointer:
    settings = {"keep_last": 0, "config": CONFIG, "identity": IDENTITY, "compiled": False}
    settings |= {"engine": engine or engine_of(), "state": FakeState(value), "log": FakeLog()}
    return Checkpointer(run=run, **settings | changes)


def save(run: RunFolder, *steps: int, keep_last: int = 0, val_losses=None) -> FakeLog:
    log = FakeLog()
    for step in steps:
        checkpointer = checkpointer_of(run, float(step), keep_last=keep_last, log=log)
        checkpointer.save(step, (val_losses or {}).get(step))
        checkpointer.wait()
    return log


def load(run: RunFolder, step: int, engine: Engine | None = None) -> tuple[FakeState, FakeLog]:
    state, log = FakeState(), FakeLog()
    load_checkpoint(run.checkpoint(step), engine or engine_of(), state, log)
    return state, log


def test_what_was_saved_comes_back(run):
    log = save(run, 5)
    assert log.lines[0].startswith(f"saved {run.checkpoint(5)}: training stalled ")
    assert "MB/s" in log.lines[0]
    assert damage(run.checkpoint(5)) is None
    assert run.latest.read_text() == "step-00000005\n"
    assert read_state(run.checkpoint(5))["identity"] == IDENTITY
    torch.manual_seed(1)
    state, log = load(run, 5)
    assert (state.value, state.step, log.loaded) == (5.0, 3, [1.0, 2.0, 0.0])


@pytest.mark.parametrize("compiled", [True, False])
def test_what_a_run_that_resumes_must_know_is_recorded(run, compiled):
    checkpointer = checkpointer_of(run, compiled=compiled)
    checkpointer.save(7, 2.5)
    assert checkpointer.wait()
    assert read_state(run.checkpoint(7)) == {
        "step": 7,
        "val_loss": 2.5,
        "model": CONFIG.to_dict(),
        "identity": IDENTITY,
        "processes": 1,
        "compiled": compiled,
        "optimizer_step": 3,
        "loss_scale": None,
    }


def test_random_numbers_go_on_where_they_were(run):
    torch.manual_seed(7)
    save(run, 1)
    expected = torch.rand(3)
    load(run, 1)
    assert torch.equal(torch.rand(3), expected)


def gather_for(monkeypatch, processes: int) -> None:
    """Every other process has drawn other numbers, and collected `rank` micro-batches more."""

    def gather(mine: list[dict]) -> list[dict]:
        everyone = [dict(mine[0]) for _ in range(processes)]
        for rank, state in enumerate(everyone):
            state["cpu"] = torch.Generator().manual_seed(rank).get_state()
            state["log"] = mine[0]["log"] + torch.tensor([rank, rank, 0.0])
        return everyone

    monkeypatch.setattr(checkpointing, "gather_object", gather)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_process_gets_its_own_random_numbers_and_log_line_back(run, monkeypatch, rank):
    gather_for(monkeypatch, 3)
    checkpointer = checkpointer_of(run, engine=engine_of(3))
    checkpointer.save(1, None)
    assert checkpointer.wait()
    _, log = load(run, 1, engine_of(3, rank))
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(rank).get_state())
    assert log.loaded == [1.0 + rank, 2.0 + rank, 0.0]


@pytest.mark.parametrize("processes", [1, 2, 6])
def test_another_number_of_processes_shares_the_log_line_and_says_that_dropout_differs(
    run, monkeypatch, capsys, processes
):
    """3 processes have collected losses of 1 + 2 + 3 in 2 + 3 + 4 micro-batches."""
    gather_for(monkeypatch, 3)
    checkpointer = checkpointer_of(run, engine=engine_of(3))
    checkpointer.save(1, None)
    assert checkpointer.wait()
    torch.manual_seed(11)
    before = torch.get_rng_state()
    _, log = load(run, 1, engine_of(processes))
    assert torch.equal(torch.get_rng_state(), before)
    assert log.loaded == pytest.approx([6 / processes, 9 / processes, 0.0])
    assert "dropout" in capsys.readouterr().out
    load(run, 1, engine_of(processes, rank=1))
    assert capsys.readouterr().out == ""


def test_other_processes_give_their_part_and_write_nothing(run, monkeypatch):
    gather_for(monkeypatch, 2)
    checkpointer = checkpointer_of(run, engine=engine_of(2, rank=1))
    checkpointer.save(1, None)
    assert checkpointer.wait()
    assert not run.path.exists()


def test_the_newest_and_the_best_are_kept(run):
    save(run, 1, 2, 3, 4, 5, keep_last=2, val_losses={1: 3.0, 2: 1.0, 3: 2.0})
    assert [int(p.name[5:]) for p in run.all_checkpoints()] == [2, 4, 5]


def test_a_validation_is_the_best_if_it_is_lower_than_all_before(run):
    checkpointer = checkpointer_of(run)
    losses = [None, 3.0, 3.0, 2.0, 2.5, None, 1.9]
    best = [checkpointer.is_best(loss) for loss in losses]
    assert best == [False, True, False, True, False, False, True]


def test_a_run_that_goes_on_knows_the_best_of_its_own_course(run):
    """Of what was saved up to the step that it goes on from, whatever the state of the others."""
    save(run, 1, 2, 3, 4, val_losses={1: 3.0, 2: 2.0, 4: 1.0})
    (run.checkpoint(3) / "state.json").write_text("{")
    checkpointer = checkpointer_of(run, start_step=3)
    assert [checkpointer.is_best(loss) for loss in (2.5, 2.0, 1.9, 1.95)] == [
        *(False, False, True, False)
    ]


@pytest.fixture
def slow_disk(monkeypatch):
    """A disk on which nothing is written before the event."""
    there = threading.Event()

    def write(*args):
        there.wait()
        return write_checkpoint(*args)

    monkeypatch.setattr(checkpointing, "write_checkpoint", write)
    yield there
    there.set()


def test_training_goes_on_while_the_copy_is_being_written(run, slow_disk):
    """What it changes meanwhile is not in the copy, and the save is told once, when it is over."""
    checkpointer = checkpointer_of(run, 1.0)
    checkpointer.save(1, None)
    checkpointer.state.value = 2.0
    checkpointer.poll()
    assert checkpointer.log.lines == []
    assert run.all_checkpoints() == []
    slow_disk.set()
    checkpointer._writer.join()
    assert checkpointer.log.lines == []
    for _ in range(2):
        checkpointer.poll()
    (line,) = checkpointer.log.lines
    assert line.startswith(f"saved {run.checkpoint(1)}: ")
    assert load(run, 1)[0].value == 1.0


def test_a_save_waits_for_the_one_before_it(run, slow_disk):
    checkpointer = checkpointer_of(run)
    checkpointer.save(1, None)
    slow_disk.set()
    checkpointer.save(2, None)
    assert checkpointer.log.lines[0].startswith(f"saved {run.checkpoint(1)}: ")
    assert checkpointer.wait()
    assert [line.split(":")[0] for line in checkpointer.log.lines] == [
        f"saved {run.checkpoint(step)}" for step in (1, 2)
    ]


def test_any_failure_of_the_writing_thread_is_reported(run, monkeypatch):
    monkeypatch.setattr("runs.checkpoint.sha256_of", lambda path: 1 / 0)
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
    log = save(run, 3)
    assert log.lines[0].startswith("saved")
    assert damage(run.checkpoint(3)) is None


def test_whether_the_last_save_failed_is_known_until_one_succeeds(run, monkeypatch):
    checkpointer = checkpointer_of(run)
    assert checkpointer.wait()  # there was none
    with monkeypatch.context() as patch:
        patch.setattr("runs.checkpoint.sha256_of", lambda path: 1 / 0)
        checkpointer.save(1, None)
        assert not checkpointer.wait()
    assert not checkpointer.wait()
    checkpointer.save(2, None)
    assert checkpointer.wait()


def test_old_checkpoints_that_went_by_halves_harm_no_save(run):
    """A kill, or someone's hand."""
    save(run, 1, 2, 3)
    (run.checkpoint(2) / "state.json").unlink()
    (run.checkpoints / "step-00000001.old-7").mkdir()
    log = save(run, 4, 5, keep_last=2)
    assert all(line.startswith("saved") for line in log.lines)
    assert sorted(p.name for p in run.checkpoints.glob("step-*")) == [
        "step-00000004",
        "step-00000005",
    ]


def test_files_that_are_sound_but_foreign_are_one_clear_line(run):
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
            load(run, 1)
        except UsageError as error:
            refused += "cannot be used" in str(error)
        (run.checkpoint(1) / name).write_bytes(contents[name])
    assert refused > 100


@pytest.mark.parametrize("state", ["[]", "7", "null", '{"step": 1}', '{"identity": "x"}', "\xff"])
def test_a_state_that_is_none_is_one_clear_line(run, state):
    save(run, 1)
    (run.checkpoint(1) / "state.json").write_bytes(state.encode("latin-1"))
    with pytest.raises(UsageError, match=r"checkpoint .* cannot be used: ") as error:
        load(run, 1)
    assert "\n" not in str(error.value)
