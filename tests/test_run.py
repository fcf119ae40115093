"""The verbs of a step; what comes between two steps is in tests/integration."""

import json
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data.teacher_logits import TopK
from training.recorded_teacher import RecordedTeacher
from training.setup import build_model

from data.dataset import PackedDataset
from model import IGNORE_INDEX, LMConfig
from runs.folder import RunFolder
from training.arguments import TrainingArguments
from training.engine.compilation import Compilation
from training.engine.launch import Engine
from training.interruption import SIGNALS
from training.resume import StartingPoint
from training.run import Run

ACCUMULATION, BATCH, SEQ_LEN, VOCAB = 3, 2, 8, 50
ALL = [SEQ_LEN] * ACCUMULATION * BATCH


class Sequences(PackedDataset):
    """Random sequences, of which so many of the targets count."""

    def __init__(self, counts: list[int], every_target_counts: bool):
        self.counts, self.seq_len = counts, SEQ_LEN
        self.every_target_counts = every_target_counts
        self.split = "train"
        splits = {"train": {"shards": [{"sha256": "1" * 64}]}}
        self.description = {"tokenizer_sha256": "2" * 64, "splits": splits}

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(i)
        tokens, targets = torch.randint(VOCAB, (2, SEQ_LEN), generator=generator)
        targets[self.counts[i] :] = IGNORE_INDEX
        return tokens, targets


@pytest.fixture
def run_of(accelerator, tmp_path):
    """Makes the Run of a tiny model on such sequences, which begins after step `trained` of 4."""
    runs, handlers = [], {number: signal.getsignal(number) for number in SIGNALS}

    def make(counts=ALL, every_target_counts: bool = True, trained: int = 0, **flags) -> Run:
        defaults = {"batch_size": BATCH, "accumulation_steps": ACCUMULATION, "warmup_steps": 2}
        args = TrainingArguments(**defaults | {"dtype": "float32", "log_interval": 1} | flags)
        engine = Engine(accelerator, "single process", deepspeed=None)
        engine.set_accumulation(ACCUMULATION)
        config = LMConfig(dim=16, n_layers=1, n_heads=2, vocab_size=VOCAB, max_seq_len=SEQ_LEN)
        built = build_model(config, args, engine, Compilation(False, "a test"))
        start = StartingPoint(RunFolder(tmp_path), state={"step": trained})
        data = Sequences(counts, every_target_counts)
        runs.append(
            Run(
                args, engine, start, built, train_set=data, val_set=None, total_steps=4, started=0.0
            )
        )
        runs[-1].log.open()
        return runs[-1]

    yield make
    for run in runs:
        run.log.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def take(run: Run, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What `train_pretrain_accelerate.train` does before it updates; returns the micro-batches."""
    batches = []
    run.begin(step)
    for tokens, targets in run.micro_batches():
        batches.append((tokens, targets))
        with run.accumulate():
            loss = run.model(tokens, targets).loss
            run.backward(loss)
    return batches


def gradients(run: Run) -> list[torch.Tensor]:
    return [p.grad.clone() for p in run.model.parameters()]


def of_all_at_once(run: Run, batches: list) -> tuple[list[torch.Tensor], float]:
    """Gradients and loss of a batch made of all micro-batches; those of the run are forgotten."""
    tokens, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    run.model.zero_grad()
    loss = run.model(tokens, targets).loss
    loss.backward()
    return gradients(run), loss.item()


def logged_loss(run: Run, tmp_path, step: int) -> float:
    run.log.step(step, run.rate, run.grad_norm, 0.0)
    return json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["loss"]


def test_utilisation_goes_by_the_length_of_rows(run_of, monkeypatch):
    whole = run_of().log.flops_per_token
    monkeypatch.setattr(Sequences, "lengths", np.full(len(ALL), 2))
    attention = 12 * 16  # n_layers 1, n_heads · head_dim 16; of a position
    assert whole - run_of().log.flops_per_token == attention * (SEQ_LEN - 2)


@pytest.mark.parametrize(
    ("counts", "every_target_counts"),
    [
        (ALL, True),
        (ALL, False),  # counting them gives the same
        ([8, 1, 0, 3, 8, 2], False),
        ([0, 0, 5, 0, 0, 1], False),
        ([0, 0, 0, 0, 0, 1], False),
    ],
)
def test_every_target_of_a_step_weighs_the_same_whichever_micro_batch_it_is_in(
    run_of, tmp_path, counts, every_target_counts
):
    run = run_of(counts, every_target_counts)
    batches = take(run, 1)
    accumulated = gradients(run)
    expected, loss = of_all_at_once(run, batches)
    torch.testing.assert_close(accumulated, expected, rtol=1e-4, atol=1e-7)
    assert any(gradient.any() for gradient in expected)
    run.grad_norm = 1.0
    assert logged_loss(run, tmp_path, 1) == pytest.approx(loss, rel=1e-6)


def test_a_step_without_any_target_has_no_gradient_and_no_loss(run_of, tmp_path):
    run = run_of([0] * len(ALL), every_target_counts=False)
    take(run, 1)
    assert not any(gradient.any() for gradient in gradients(run))
    run.update()
    assert run.grad_norm == 0
    assert logged_loss(run, tmp_path, 1) is None


def test_what_was_recorded_of_a_teacher_comes_with_its_micro_batch_and_not_sooner(run_of):
    """Where targets are masked, a whole step is read ahead."""
    run = run_of([3] * len(ALL) * 2, every_target_counts=False)
    kept = ((torch.full((BATCH, SEQ_LEN, 2), i), torch.zeros(BATCH, SEQ_LEN, 3)) for i in range(9))
    run.batches = ((*some, TopK(*own)) for some, own in zip(run.batches, kept, strict=False))
    run.teacher = RecordedTeacher(None, "a hash", None)
    run.accelerator = SimpleNamespace(device=torch.device("meta"))
    asked = []
    for tokens, _ in run.micro_batches():
        assert tokens.is_meta
        assert all(x.is_meta for x in run.teacher(tokens))
        asked.append([int(each.recorded.ids[0, 0, 0]) for each in run._ahead])
    assert asked == [[1, 2], [2], []]


def test_every_step_reads_its_own_samples_and_an_epoch_all_of_them(run_of):
    run = run_of(ALL * 2)
    read = [take(run, step) for step in (1, 2)]
    assert [[tokens.shape for tokens, _ in step] for step in read] == [[(BATCH, SEQ_LEN)] * 3] * 2
    tokens = [sequence.tolist() for step in read for tokens, _ in step for sequence in tokens]
    assert sorted(tokens) == sorted(run.train_set[i][0].tolist() for i in range(len(ALL) * 2))


def test_a_run_goes_on_with_the_samples_after_those_that_were_trained(run_of):
    begun = run_of(ALL * 2)
    take(begun, 1)
    second = take(begun, 2)
    resumed = run_of(ALL * 2, trained=1)
    for (tokens, _), (expected, _) in zip(take(resumed, 2), second, strict=True):
        assert torch.equal(tokens, expected)


@pytest.mark.parametrize(("trained", "steps"), [(0, [1, 2, 3, 4]), (2, [3, 4]), (4, [])])
def test_steps_go_from_the_first_one_of_this_start_to_the_last(run_of, trained, steps):
    run = run_of(trained=trained)
    run.model.eval()
    assert list(run.steps()) == steps
    assert run.model.training
    assert run.samples_per_step == ACCUMULATION * BATCH


def test_a_step_takes_its_learning_rate_and_begins_a_new_gradient(run_of):
    run = run_of()
    for step in (1, 2):
        before = [p.detach().clone() for p in run.model.parameters()]
        take(run, step)
        run.update()
        assert run.rate == run.learning_rate(step) == run.args.learning_rate * step / 2
        assert {group["lr"] for group in run.optimizer.param_groups} == {run.rate}
        assert all(p.grad is None for p in run.model.parameters())
        assert not any(map(torch.equal, before, run.model.parameters()))


@pytest.mark.parametrize(("grad_clip", "clipped"), [(1e-3, True), (0.0, False)])
def test_a_gradient_is_clipped_to_the_norm_that_was_asked_for_and_by_0_not_at_all(
    run_of, monkeypatch, grad_clip, clipped
):
    run = run_of(grad_clip=grad_clip)
    take(run, 1)
    whole, stepped = gradients(run), []
    monkeypatch.setattr(run.optimizer, "step", lambda: stepped.append(gradients(run)))
    run.update()
    norm = torch.cat([g.flatten() for g in whole]).norm().item()
    assert run.grad_norm == pytest.approx(norm)
    after = torch.cat([g.flatten() for g in stepped[0]]).norm().item()
    assert after == pytest.approx(1e-3 if clipped else norm, rel=1e-2)


def weights_and_state(run: Run) -> dict[str, torch.Tensor]:
    """Copies of all that a step changes."""
    names = {id(p): name for name, p in run.model.named_parameters()}
    kept = {names[id(p)]: p for p in run.model.parameters()}
    for p, state in run.optimizer.state.items():
        kept |= {f"{names[id(p)]} {key}": value for key, value in state.items()}
    return {name: tensor.detach().clone() for name, tensor in kept.items()}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_changes_nothing(run_of, optimizer, bad):
    run = run_of(optimizer=optimizer)
    before = [p.detach().clone() for p in run.model.parameters()]
    for step in (1, 2, 3):
        take(run, step)
        if step != 2:
            run.model.norm.weight.grad[0] = bad
        kept = weights_and_state(run)
        run.update()
        assert torch.tensor(run.grad_norm).isfinite() == (step == 2)
        assert all(p.grad is None for p in run.model.parameters())
        if step == 1:
            assert all(map(torch.equal, before, run.model.parameters()))
            assert not any(
                tensor.any() for state in run.optimizer.state.values() for tensor in state.values()
            )
        if step == 3:
            after = weights_and_state(run)
            assert kept.keys() == after.keys()
            assert all(torch.equal(kept[name], after[name]) for name in kept)
            assert "norm.weight step" in kept
            assert kept["norm.weight step"] == 1


class OnTheGPU(torch.Tensor):
    """A number that nobody may ask for yet."""

    is_cuda = True

    def item(self):
        raise AssertionError("the GPU has to be waited for")

    __float__ = __bool__ = tolist = item


def test_adamw_steps_without_waiting_for_the_norm_of_the_gradient(run_of, monkeypatch):
    run = run_of()
    clip = run.accelerator.clip_grad_norm_
    monkeypatch.setattr(
        run.accelerator, "clip_grad_norm_", lambda *args: clip(*args).as_subclass(OnTheGPU)
    )
    take(run, 1)
    run.update()
    assert run.optimizer.state
    assert isinstance(run.grad_norm, OnTheGPU)


@pytest.mark.parametrize(("interval", "steps"), [(2, [2]), (0, [])])
def test_a_sample_is_written_at_every_interval(run_of, monkeypatch, interval, steps):
    run, written = run_of(sample_interval=interval), []
    monkeypatch.setattr(run, "write_sample", written.append)
    for step in (1, 2, 3):
        take(run, step)
        run.update()
        run.report(step)
    assert written == steps


@pytest.mark.parametrize("every_target_counts", [True, False])
def test_micro_batches_are_read_while_a_gpu_is_at_the_forward_pass(
    run_of, monkeypatch, every_target_counts
):
    """But for those that the first step begins with."""
    run, events = run_of(ALL * 2, every_target_counts), []

    def noted(name, function):
        return lambda *args: (events.append(name), function(*args))[1]

    monkeypatch.setattr(run, "batches", map(noted("read", lambda x: x), run.batches))
    monkeypatch.setattr(run.model, "forward", noted("forward", run.model.forward))
    monkeypatch.setattr(run.accelerator, "backward", noted("backward", run.accelerator.backward))
    for step in (1, 2):
        take(run, step)
    first = 1 if every_target_counts else ACCUMULATION
    assert events == ["read"] * first + ["forward", "read", "backward"] * 2 * ACCUMULATION
