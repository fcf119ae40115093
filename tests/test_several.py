"""What runs side by side share: a progress bar, and the step they go on from."""

import json
import re
import shutil
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import UsageError
from runs.folder import RunFolder
from training import checkpointing, several
from training.arguments import TrainingArguments
from training.several import Lane, Runs, resumed_together


@pytest.fixture
def models(tmp_path):
    """The arguments of models, each with checkpoints after some steps."""

    def make(**steps: list[int]) -> list[TrainingArguments]:
        for name, own in steps.items():
            for step in own:
                RunFolder(tmp_path / name).checkpoint(step).mkdir(parents=True)
        where = {"out_dir": str(tmp_path), "resume": "auto"}
        return [TrainingArguments(run_name=name, **where) for name in steps]

    return make


@pytest.fixture
def damaged(monkeypatch) -> set[str]:
    """Names of runs and steps whose checkpoint is damaged, such as small/20."""
    names = set()

    def damage(path):
        is_damaged = f"{path.parents[1].name}/{int(path.name[5:])}" in names
        return "weights.safetensors is not what it was" if is_damaged else None

    monkeypatch.setattr(several, "damage", damage)
    return names


def steps_of(paths: list[str | Path]) -> list[int]:
    return [int(re.search(r"step-(\d+)$", str(path))[1]) for path in paths]


def test_all_go_on_from_the_newest_step_that_all_have(models, damaged, tmp_path):
    paths = resumed_together(models(small=[10, 20, 30], large=[10, 20], other=[5, 10, 20, 40]))
    assert steps_of(paths) == [20, 20, 20]
    assert paths[1] == str(RunFolder(tmp_path / "large").checkpoint(20))


def test_a_step_of_which_one_is_damaged_is_passed_over_aloud(models, damaged, capsys):
    damaged |= {"large/20"}
    assert steps_of(resumed_together(models(small=[10, 20], large=[10, 20]))) == [10, 10]
    said = capsys.readouterr().out
    assert "step-00000020: weights.safetensors is not what it was; trying the step before" in said


def test_where_there_is_no_checkpoint_yet_new_runs_start(models, damaged):
    assert resumed_together(models(small=[], large=[])) == ["auto", "auto"]


@pytest.mark.parametrize(
    ("steps", "bad", "said"),
    [
        ({"small": [10, 20], "new": []}, set(), r"small 10, 20; \S+new none"),
        ({"small": [10], "large": [30]}, set(), r"small 10; \S+large 30"),
        ({"small": [10], "large": [10]}, {"small/10"}, r"small 10; \S+large 10"),
    ],
)
def test_without_a_step_of_all_it_says_which_run_is_where(models, damaged, steps, bad, said):
    damaged |= bad
    with pytest.raises(UsageError, match=rf"which all have a sound checkpoint \(\S+{said}\)"):
        resumed_together(models(**steps))


def test_none_is_taken_back_to_where_another_gave_up(models, damaged, tmp_path):
    asked = models(good=[10, 20, 50], bad=[10])
    assert steps_of(resumed_together(asked)) == [10, 10]  # behind by a kill between two saves
    RunFolder(tmp_path / "bad").bad_samples.touch()
    said = "bad gave up, its newest checkpoint is of step 10, and others went on to step 50: leave "
    with pytest.raises(UsageError, match=said):
        resumed_together(asked)
    assert steps_of(resumed_together(asked[:1])) == [50]


def test_one_that_gave_up_where_all_are_goes_on_with_them(models, damaged, tmp_path):
    asked = models(good=[10], bad=[10])
    RunFolder(tmp_path / "bad").bad_samples.touch()
    assert steps_of(resumed_together(asked)) == [10, 10]


def test_new_runs_are_not_resumed(models, damaged):
    asked = models(small=[10], large=[10])
    for args in asked:
        args.resume = None
    assert resumed_together(asked) == [None, None]


def test_where_one_folder_holds_a_run_no_other_one_is_made(models, tmp_path):
    asked = models(small=[], large=[])
    for args in asked:
        args.resume = None
    metrics = RunFolder(tmp_path / "large").metrics
    metrics.parent.mkdir()
    metrics.touch()
    with pytest.raises(UsageError, match="large holds a run: pass --resume auto"):
        resumed_together(asked)
    assert not (tmp_path / "small").exists()


class Bar:
    """A progress bar that remembers."""

    def __init__(self):
        self.disable, self.shown, self.moves = False, "", 0

    def clear(self) -> None:
        self.shown = ""

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.shown = text

    def update(self) -> None:
        self.moves += 1

    def close(self) -> None:
        pass


class Batch:
    """That can be watched."""


class FakeRun:
    """As much of a Run as goes on beside others."""

    gives_up, give_up, leave = False, lambda self: "why", lambda self: True

    def __init__(self, path, batches=(), n_trained: int = 0):
        self.folder, self.batches = RunFolder(path), iter(batches)
        self.args = TrainingArguments(out_dir=str(path.parent), keep_last=3)
        self.engine, self.first_step = SimpleNamespace(is_main=True), 1
        self.accelerator = SimpleNamespace(end_training=lambda: None)
        self.learning_rate = SimpleNamespace(total_steps=1000)
        self.log = SimpleNamespace(bar=Bar(), say=print, turn=nullcontext)
        self.checkpointer = SimpleNamespace(poll=lambda: None)
        self.built = SimpleNamespace(n_trained=n_trained)

    def is_time_to_save(self, step: int) -> bool:
        return False

    def save(self, step: int) -> None:
        pass

    def close(self) -> bool:
        return True


def runs_of(*runs: FakeRun, finished: tuple[Path, ...] = ()) -> Runs:
    """Runs beside each other, after those that are finished."""
    turns = dict.fromkeys(runs, SimpleNamespace(taken=nullcontext))
    folders = (*finished, *(run.folder.path for run in runs))
    sizes = {path: 1_000_000 * number for number, path in enumerate(folders, 1)}
    together = Runs(turns, sizes, started=0.0)
    together.stop = SimpleNamespace(reason=lambda: None, time_to_save=False)
    return together


def test_what_the_others_read_is_not_kept_for_one_that_gave_up(tmp_path):
    seen = []

    def batches():
        while True:
            batch = Batch()
            seen.append(weakref.ref(batch))
            yield batch

    bad, good = FakeRun(tmp_path / "bad", batches()), FakeRun(tmp_path / "good")
    together = runs_of(bad, good)
    assert next(bad.batches) is next(good.batches)
    bad.gives_up = True
    for step in range(1, 501):
        together.end(step)
        next(good.batches)
    assert together.trained == [good]
    assert sum(batch() is not None for batch in seen) < 100  # `tee` lets go of dozens at once


def test_each_keeps_what_all_can_go_on_from(tmp_path):
    runs = [FakeRun(tmp_path / name) for name in ("small", "large", "other")]
    together = runs_of(*runs)
    assert runs[1].checkpointer.beside == [runs[0].folder, runs[2].folder]
    runs[0].gives_up = True
    together.end(1)
    assert [run.checkpointer.beside for run in runs[1:]] == [[runs[2].folder], [runs[1].folder]]


def test_in_the_end_none_keeps_more_than_was_asked_for(tmp_path, monkeypatch):
    """The first to write its last checkpoint kept the one before, for the others had no other."""
    runs = [FakeRun(tmp_path / name) for name in ("small", "large")]
    for run, steps in zip(runs, ([10, 20, 30, 40], [20, 30, 40]), strict=True):
        for step in steps:
            run.folder.checkpoint(step).mkdir(parents=True)
        run.folder.metrics.write_text(json.dumps({"step": 40, "loss": 2.5}), encoding="utf-8")
    monkeypatch.setattr(checkpointing, "best", lambda checkpoints: None)
    runs_of(*runs).finish()
    assert steps_of(runs[0].folder.all_checkpoints()) == [20, 30, 40]
    assert steps_of(runs[1].folder.all_checkpoints()) == [20, 30, 40]


def test_told_to_stop_it_says_whose_model_is_to_be_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(several, "end_stopped", lambda engines, saved: None)
    bad, good = FakeRun(tmp_path / "bad"), FakeRun(tmp_path / "good")
    together = runs_of(bad, good)
    bad.gives_up = True
    together.stop.reason, together.stop.saved = lambda: "SIGTERM", lambda: None
    assert together.end(1)
    out = capsys.readouterr().out
    assert f"after step 1, saved; to go on, without the --model of {tmp_path / 'bad'}:\n" in out
    assert "--resume auto" in out


def test_table_and_page_have_those_too_that_were_finished_before_a_kill(tmp_path, capsys):
    for name in ("done", "last"):
        metrics = RunFolder(tmp_path / name).metrics
        metrics.parent.mkdir()
        metrics.write_text(json.dumps({"step": 1, "loss": 2.5}), encoding="utf-8")
    runs_of(FakeRun(tmp_path / "last"), finished=(tmp_path / "done",)).finish()
    *_, head, done, last, _, report = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["run", "parameters"]
    assert done.split() == ["done", "1.00", "million", "2.5000"]
    assert last.split() == ["last", "2.00", "million", "2.5000"]
    page = Path(report.removeprefix("report of all: ")).read_text(encoding="utf-8")
    assert all(f"<th>{name}</th>" in page for name in ("done", "last"))


def test_room_on_the_disk_is_counted_for_all_together(tmp_path, monkeypatch):
    together = runs_of(*(FakeRun(tmp_path / name, n_trained=1000) for name in ("small", "large")))
    for free, warned in ((119_999, True), (120_000, False)):  # twice five of 12,000 bytes
        monkeypatch.setattr(shutil, "disk_usage", lambda path, n=free: SimpleNamespace(free=n))
        assert bool(together.space_warning()) == warned


def test_one_bar_shows_what_each_says():
    bar, shown = Bar(), {}
    small, large = Lane(bar, "small", shown), Lane(bar, "large", shown)
    small.set_postfix_str("loss 1", refresh=False)
    large.set_postfix_str("loss 2", refresh=False)
    small.update()
    large.update()
    small.set_postfix_str("loss 3", refresh=False)
    assert bar.shown == "small loss 3; large loss 2"
    small.close()  # it gave up
    large.set_postfix_str("loss 4", refresh=False)
    assert bar.shown == "large loss 4"


def test_the_batch_must_be_as_large_for_all():
    """Trained apart, each has had its own; on other processes accumulation would keep it."""
    runs = [
        SimpleNamespace(folder=RunFolder(Path("out", name)), samples_per_step=n)
        for name, n in (("a", 4), ("b", 8))
    ]
    several._require_one_batch(runs[:1] * 2)
    with pytest.raises(UsageError, match="in sequences: a 4, b 8; "):
        several._require_one_batch(runs)


def test_sequences_of_weights_must_be_as_long_for_all():
    asked = [TrainingArguments(run_name=name) for name in ("a", "b")]
    lengths = [SimpleNamespace(max_seq_len=n) for n in (256, 512)]
    several._require_one_length(asked, [lengths[0], lengths[0]])
    with pytest.raises(UsageError, match=r"--max_seq_len for all \(a 256, b 512\)"):
        several._require_one_length(asked, lengths)
