"""Saving while training continues, and loading; test_checkpoint.py tests the files."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import error_of

from lm.engine.engine import Engine
from lm.storage.checkpoint import damage, read_state, write_checkpoint
from lm.storage.folder import RunFolder, step_of
from lm.training import checkpoint_writer
from lm.training import runs as training_runs
from lm.training.checkpoint_writer import is_best, load_checkpoint
from lm.training.loss_meter import LossMeter
from lm.training.runs import Runs
from model import LMConfig

CONFIG = LMConfig(dim=48, n_layers=3, n_heads=4, vocab_size=400)
IDENTITY = {"data": "1" * 16, "global_batch": 8, "optimizer": "adamw"}


class FakeState:
    """A TrainingState whose 64 weights all equal `value`."""

    def __init__(self, value: float = 1.0, engine: Engine | None = None):
        self.value, self.engine = value, engine

    def weights(self):
        return {"w": torch.full((64,), self.value)}

    def moments(self):
        return {"w.exp_avg": torch.zeros(64), "w.exp_avg_sq": torch.ones(64)}

    def scalars(self):
        return {"optimizer_step": 3, "loss_scale": None}

    def load(self, weights, moments, scalars, source):
        self.value, self.step = weights["w"][0].item(), scalars["optimizer_step"]


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def engine_of(processes: int = 1, rank: int = 0) -> Engine:
    """Return the engine of one rank. Without a `cpu_group`, decisions wait for no other rank."""
    accelerator = SimpleNamespace(
        is_main_process=rank == 0,
        num_processes=processes,
        process_index=rank,
        device=torch.device("cpu"),
        reduce=lambda mine: mine,
    )
    return Engine(accelerator, "any engine", deepspeed=None)


def sums_of(meter: LossMeter) -> dict[str, float]:
    return {name.removeprefix("log."): value.item() for name, value in meter.state().items()}


def runs_of(
    *folders: RunFolder, value: float = 1.0, engine: Engine | None = None, keep_last=0
) -> Runs:
    """Make runs that can only be saved."""
    engine, runs = engine or engine_of(), Runs(Mock())
    for folder in folders:
        lines, meter = [], LossMeter(engine.accelerator)
        meter.add(2.0, loss=torch.tensor(0.5))
        meter.end_step(1.0)
        log = SimpleNamespace(lines=lines, say=lines.append, meter=meter, paused=0.0)
        log.pause = nullcontext
        place = {"folder": folder, "engine": engine, "accelerator": engine.accelerator}
        facts = {"processes": engine.processes, "identity": IDENTITY}
        state = FakeState(value, engine)
        runs.add(Mock(state=state, facts=facts, log=log, val_loss=None, **place))
        runs.all[-1].args.keep_last = keep_last
    return runs


def save(runs: Runs, *steps: int, val_losses=None) -> bool:
    """Save these steps, one after the other; return whether the last save succeeded."""
    for step in steps:
        for run in runs.all:
            run.state.value = float(step)
            run.val_loss = (val_losses or {}).get(step)
        runs.save(step)
        saved = runs.wait()
    return saved


def lines_of(runs: Runs) -> list[str]:
    """Return what the first run has logged."""
    return runs.all[0].log.lines


def load(run: RunFolder, step: int, engine: Engine | None = None) -> tuple:
    engine = engine or engine_of()
    state, meter = FakeState(), LossMeter(engine.accelerator)
    load_checkpoint(run.checkpoint(step), engine, state, meter)
    return state, meter


def steps_of(run: RunFolder) -> list[int]:
    return [step_of(path) for path in run.all_checkpoints()]


def test_a_saved_state_is_loaded_again(run):
    torch.manual_seed(7)
    runs = runs_of(run)
    assert save(runs, 5, val_losses={5: 2.5})
    assert lines_of(runs)[0].startswith(f"saved {run.checkpoint(5)}: ")
    assert read_state(run.checkpoint(5)) == {
        **{"step": 5, "val_loss": 2.5, "processes": 1, "identity": IDENTITY},
        **{"optimizer_step": 3, "loss_scale": None},
    }
    expected = torch.rand(3)
    state, meter = load(run, 5)
    assert (state.value, state.step) == (5.0, 3)
    assert sums_of(meter) == {"loss": 1.0, "weight": 2.0, "skipped_steps": 0}
    assert torch.equal(torch.rand(3), expected)


@pytest.fixture
def of_three(run, monkeypatch):
    """A checkpoint of three ranks. Rank i's meter has the sums 1 + i (loss) and 2 + i (weight)."""

    def gather(mine: list[dict]) -> list[dict]:
        everyone = [{name: value.clone() for name, value in mine[0].items()} for _ in range(3)]
        for rank, state in enumerate(everyone):
            state["cpu"] = torch.Generator().manual_seed(rank).get_state()
            for name in ("log.loss", "log.weight"):
                state[name] = mine[0][name] + rank
        return everyone

    monkeypatch.setattr(checkpoint_writer, "gather_object", gather)
    for rank in (1, 0):
        assert save(runs_of(run, engine=engine_of(3, rank)), 1)
        assert run.path.exists() == (rank == 0)  # only rank 0 writes


@pytest.mark.parametrize("processes", [1, 6])
def test_more_or_fewer_processes_keep_the_meter_but_not_dropout(run, of_three, capsys, processes):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    _, meter = load(run, 1, engine_of(processes))
    assert torch.equal(torch.get_rng_state(), before)
    assert sums_of(meter) == {"loss": 6, "weight": 9, "skipped_steps": 0}
    assert "dropout" in capsys.readouterr().out
    _, meter = load(run, 1, engine_of(processes, rank=1))
    assert capsys.readouterr().out == ""
    assert sums_of(meter) == {"loss": 0, "weight": 0, "skipped_steps": 0}


@pytest.mark.parametrize(("keep_last", "kept"), [(2, [2, 4, 5]), (1, [2, 5]), (0, [1, 2, 3, 4, 5])])
def test_saving_keeps_the_newest_and_the_best_checkpoints(run, keep_last, kept):
    """Leftovers of a killed save and of a resume are deleted too, unless keep_last is 0."""
    leftovers = [run.checkpoints / "step-00000009.partial", run.path / "weights.aside-17"]
    for folder in leftovers:
        folder.mkdir(parents=True)
    save(runs_of(run, keep_last=keep_last), 1, 2, 3, 4, 5, val_losses={1: 3.0, 2: 1.0, 3: 2.0})
    assert steps_of(run) == kept
    assert [path.exists() for path in leftovers] == [keep_last == 0] * 2


def test_the_best_checkpoint_is_that_of_all_undamaged_ones(run):
    """Checkpoint 3 is damaged."""
    assert is_best(engine_of(), run, 9.0)
    save(runs_of(run), 1, 2, 3, 4, val_losses={1: 3.0, 2: 2.0, 3: 1.5, 4: 2.5})
    (run.checkpoint(3) / "state.json").write_text("{")
    assert [is_best(engine_of(), run, loss) for loss in (1.9, 2.0)] == [True, False]


def test_training_goes_on_while_the_copy_is_being_written(run, monkeypatch):
    """Later changes by training are not in the copy. A second save waits for the first save."""
    may_write = threading.Event()

    def write(*args):
        may_write.wait(timeout=60)
        return write_checkpoint(*args)

    monkeypatch.setattr("lm.training.runs.write_checkpoint", write)
    runs = runs_of(run, value=1.0)
    runs.save(1)
    runs.all[0].state.value = 2.0
    assert lines_of(runs) == run.all_checkpoints() == []
    may_write.set()
    runs.save(2)
    assert lines_of(runs)[0].startswith(f"saved {run.checkpoint(1)}: ")
    assert runs.wait()
    assert len(lines_of(runs)) == 2
    assert [load(run, step)[0].value for step in (1, 2)] == [1.0, 2.0]


def test_a_failed_save_leaves_the_previous_checkpoint_and_the_next_save_works(run, monkeypatch):
    save(runs_of(run), 1, val_losses={1: 3.0})
    runs = runs_of(run)
    assert runs.wait()  # there is no save to wait for

    def refuse(*args, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lm.formats.portable.save_tensors", refuse)
        assert not save(runs, 2, val_losses={2: 1.0})
    assert lines_of(runs)[-1].startswith("CHECKPOINT NOT SAVED: [Errno 28] No space left")
    assert steps_of(run) == [1]
    assert run.latest.read_text() == "step-00000001\n"
    # The loss of the failed save does not count.
    assert [is_best(engine_of(), run, loss) for loss in (2.0, 3.0)] == [True, False]
    assert not is_best(engine_of(), run, 2.0, pending=1.0)  # but that of one being written
    assert save(runs, 3, val_losses={3: 2.0})
    assert damage(run.checkpoint(3)) is None


def test_the_main_process_decides_what_is_best(run, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "on_main_process", lambda engine, decide: engine.is_main)
    assert not is_best(engine_of(2, rank=1), run, 9.0)


def test_of_models_that_train_together_memory_holds_one_copy(run, tmp_path, monkeypatch):
    runs = runs_of(run, RunFolder(tmp_path / "other"))
    events, copy, write = [], training_runs.copy_state, training_runs.write_checkpoint

    def called(name, function):
        return lambda *args: events.append(name) or function(*args)

    monkeypatch.setattr(training_runs, "copy_state", called("copy", copy))
    monkeypatch.setattr(training_runs, "write_checkpoint", called("write", write))
    assert save(runs, 1)
    assert events == ["copy", "write"] * 2


def test_models_trained_together_prune_when_all_saved_the_same_step(run, tmp_path, monkeypatch):
    other = RunFolder(tmp_path / "other")
    runs = runs_of(run, other, keep_last=1)
    save(runs, 1)
    with monkeypatch.context() as patch:
        patch.setattr(runs.all[0], "facts", {"not JSON": object()})
        assert not save(runs, 2)
    assert (steps_of(run), steps_of(other)) == ([1], [1, 2])
    assert save(runs, 3)
    assert (steps_of(run), steps_of(other)) == ([3], [3])


@pytest.mark.parametrize(
    ("file", "wrong"),
    [("state.json", b'{"step": 1}'), ("weights.safetensors", b""), ("random.safetensors", b"0")],
)
def test_a_checkpoint_file_with_wrong_contents_is_refused_in_one_line(run, file, wrong):
    save(runs_of(run), 1)
    (run.checkpoint(1) / file).write_bytes(wrong)
    assert "step-00000001" in error_of(load, run, 1)
