"""The parts of a training step. Whole launches are tested in tests/integration."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import error_of

from lm.data.dataset import PackedDataset
from lm.data.shards import CONVERSATIONS, TEXT
from lm.engine.engine import Engine
from lm.storage.folder import RunFolder, step_of
from lm.training.arguments import TrainingArguments
from lm.training.inputs import Inputs, shapes_of
from lm.training.run import MicroBatch, Run
from lm.training.runs import Runs
from lm.training.starting_point import StartingPoint
from model import IGNORE_INDEX, LMConfig
from train_sft_accelerate import train

ACCUMULATION, BATCH, SEQ_LEN, VOCAB, STEPS = 3, 2, 8, 50, 4
ALL = [SEQ_LEN] * ACCUMULATION * BATCH
NAN, INF = float("nan"), float("inf")


class Sequences(PackedDataset):
    """Random sequences. In sequence i, only the first `counts[i]` targets count."""

    def __init__(self, counts: list[int]):
        self.counts, self.seq_len = counts, SEQ_LEN
        self.kind = TEXT if counts == ALL else CONVERSATIONS

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(i)
        tokens, targets = torch.randint(VOCAB, (2, SEQ_LEN), generator=generator)
        targets[self.counts[i] :] = IGNORE_INDEX
        return tokens, targets


@pytest.fixture
def run_of(accelerator, tmp_path):
    """Makes a Run of a tiny model on `Sequences`, as if `trained` of its 4 steps were done."""
    made = []

    def make(counts=ALL, trained: int = 0, **flags) -> Run:
        defaults = {"batch_size": BATCH, "accumulation_steps": ACCUMULATION, "warmup_steps": 2}
        defaults |= {"dtype": "float32", "log_interval": 1, "compile": "off", "log_with": "none"}
        args = TrainingArguments(**defaults | flags)
        engine = Engine(accelerator, "single process", deepspeed=None)
        engine.set_accumulation(ACCUMULATION)
        config = LMConfig(dim=16, n_layers=1, n_heads=2, vocab_size=VOCAB, max_seq_len=SEQ_LEN)
        inputs = Inputs(
            args=args,
            start=StartingPoint(RunFolder(tmp_path), state={"step": trained}),
            source=None,
            teacher=None,
            train_set=Sequences(counts),
            val_set=None,
            config=config,
            shapes=shapes_of(config, args),
            identity={},
            total_steps=STEPS,
        )
        stop = SimpleNamespace(reason=lambda: None, time_to_save=False, saved=lambda: None)
        runs = Runs(stop)
        runs.add(Run(inputs, engine, runs))
        made.append(runs.all[0])
        made[-1].log.open()
        return made[-1]

    yield make
    for run in made:
        run.log.close()


def take(run: Run, step: int) -> list[MicroBatch]:
    """Do a step without its update; return its micro-batches."""
    batches = []
    run.begin(step)
    for batch in run.micro_batches():
        batches.append(batch)
        with run.accumulate():
            run.backward(run.model(batch.tokens, batch.targets).loss, batch)
    return batches


def gradients(run: Run) -> list[torch.Tensor]:
    return [p.grad.clone() for p in run.model.parameters()]


@pytest.mark.parametrize("counts", [ALL, [8, 1, 0, 3, 8, 2], [0, 0, 0, 0, 0, 1]])
def test_every_target_of_a_step_weighs_the_same(run_of, tmp_path, counts):
    run = run_of(counts)
    batches = take(run, 1)
    accumulated = gradients(run)
    run.end(1, 1.0)
    (row,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    run.model.zero_grad()
    tokens, targets = (torch.cat([batch[i] for batch in batches]) for i in (0, 1))
    loss = run.model(tokens, targets).loss  # all micro-batches as one batch
    loss.backward()
    torch.testing.assert_close(accumulated, gradients(run), rtol=1e-4, atol=1e-7)
    assert any(gradient.any() for gradient in accumulated)
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-6)


def test_a_step_without_any_target_has_a_gradient_of_zero(run_of):
    run = run_of([0] * len(ALL))
    take(run, 1)
    assert run.update() == 0


def test_the_last_steps_read_only_the_first_segmentation_also_in_a_resumed_run(run_of, monkeypatch):
    monkeypatch.setattr(Sequences, "n_first", 4)
    monkeypatch.setattr("lm.training.run.FIRST_SEGMENTATION_SHARE", 0.5)
    first = [Sequences(ALL)[i][0].tolist() for i in range(4)]
    read = {}
    for trained in range(4):
        run = run_of(trained=trained)
        for step in run.steps():
            rows = [row for batch in take(run, step) for row in batch.tokens.tolist()]
            assert read.setdefault(step, rows) == rows
    assert [step for step, rows in read.items() if all(row in first for row in rows)] == [3, 4]


def test_a_gradient_is_not_clipped_with_grad_clip_0(run_of, monkeypatch):
    run = run_of(grad_clip=0.0)
    monkeypatch.setattr(run.optimizer, "zero_grad", lambda: None)
    take(run, 1)
    before = gradients(run)
    run.update()
    assert all(map(torch.equal, before, gradients(run)))


def state_of(run: Run) -> list[torch.Tensor]:
    """Return copies of all tensors that a step changes."""
    states = [tensor for state in run.optimizer.state.values() for tensor in state.values()]
    return [tensor.detach().clone() for tensor in (*run.model.parameters(), *states)]


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_changes_nothing(run_of, optimizer, bad):
    run = run_of(optimizer=optimizer)
    for step in (1, 2):
        take(run, step)
        if step == 2:
            run.model.norm.weight.grad[0] = bad
        before = state_of(run)
        assert np.isfinite(run.update()) == (step == 1)
        same = list(map(torch.equal, before, state_of(run)))
        assert all(same) if step == 2 else not any(same[: len(list(run.model.parameters()))])
        assert all(p.grad is None for p in run.model.parameters())


class OnGPU(torch.Tensor):
    """A tensor whose value must not be read, because that would wait for the GPU."""

    is_cuda = True

    def item(self):
        raise AssertionError("reading the value waits for the GPU")

    __float__ = __bool__ = tolist = item


def test_an_update_does_not_wait_for_the_norm_of_the_gradient(run_of, monkeypatch):
    run = run_of()
    clip = run.accelerator.clip_grad_norm_
    on_gpu = lambda *args: clip(*args).as_subclass(OnGPU)  # noqa: E731
    monkeypatch.setattr(run.accelerator, "clip_grad_norm_", on_gpu)
    take(run, 1)
    assert isinstance(run.update(), OnGPU)


def test_samples_are_written_at_intervals_and_checkpoints_also_at_the_end(run_of, monkeypatch):
    """A checkpoint is also saved after a validation with the lowest loss so far."""
    flags = {"sample_interval": 3, "eval_interval": 1, "save_interval": 3, "keep_last": 0}
    run, samples, losses = run_of(**flags), [], iter((3.0, 3.0, 3.5, None))
    monkeypatch.setattr(run, "write_sample", samples.append)
    monkeypatch.setattr(run, "validate", lambda step: next(losses))
    for step in run.steps():
        run.end(step, 1.0)
    run.runs.wait()
    assert samples == [3]
    assert [step_of(path) for path in run.folder.all_checkpoints()] == [1, 3, 4]


def test_a_stop_request_in_the_validation_before_step_1_stops_fine_tuning_after_it(
    run_of, monkeypatch
):
    run, done = run_of(sample_interval=1), []
    run.val_loader = [None]
    run.inputs = replace(run.inputs, val_set=SimpleNamespace(bytes_per_token=1.0))
    run.runs.stop.reason = lambda: "SIGTERM"
    monkeypatch.setattr("lm.training.run.validate", lambda *_: None)  # interrupted
    monkeypatch.setattr("lm.training.run.write_sample", lambda *_: pytest.fail("writes a sample"))
    monkeypatch.setattr(run.runs, "save", lambda step: done.append((step, run.val_loss)))
    monkeypatch.setattr(run, "finish", lambda: done.append(run.runs.stopped))
    train(run)
    assert done == [(1, None), (1, "SIGTERM")]


@pytest.mark.parametrize(("most", "norms"), [(2, [NAN, 1.0, NAN, INF]), (3, [1.0, NAN, NAN, NAN])])
def test_a_run_gives_up_after_too_many_bad_steps(run_of, tmp_path, most, norms):
    run = run_of(ALL * 2, max_bad_steps=most)
    for step in (1, 2, 3):
        run.end(step, norms[step - 1])
    assert f"{most} steps in a row had a non-finite" in error_of(run.end, 4, norms[3])
    assert not list(tmp_path.glob("checkpoints/*"))


def test_ddp_does_not_broadcast_pos_cis(run_of):
    ignored = run_of().model._ddp_params_and_buffers_to_ignore
    assert list(ignored) == ["pos_cis"]
