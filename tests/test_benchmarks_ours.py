import dataclasses
import math

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from benchmarks.contenders import Contender
from benchmarks.ours import OurStep
from benchmarks.work import SIZES, VOCAB_SIZE
from benchmarks.worker import build
from training import setup
from training.engine import launch

WORK = SIZES["test"]


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """In an empty folder, without what an engine settles for this whole process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "keep_freed_memory", lambda: True)
    monkeypatch.setattr(launch, "use_all_cores", lambda: None)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_a_step_trains_the_whole_model_from_the_untrained_loss():
    step = OurStep(WORK, compiled=False)
    before = [p.detach().clone() for p in step.run.model.parameters()]
    step.step()
    assert step.loss() == pytest.approx(math.log(VOCAB_SIZE), abs=0.1)
    after = step.run.model.parameters()
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_it_is_the_same_work_as_the_peers():
    run = OurStep(WORK, compiled=False).run
    args = run.args
    assert (args.batch_size, args.grad_clip, args.dtype) == (WORK.batch_size, 1.0, "bfloat16")
    assert run.built.n_parameters == WORK.counts[0]
    tokens, targets = next(run.micro_batches())
    same_tokens, same_targets = WORK.batches(0, torch.device("cpu"))[0]
    assert torch.equal(tokens, same_tokens)
    assert torch.equal(targets, same_targets)


def test_a_step_of_several_micro_batches_updates_once(monkeypatch):
    step = OurStep(dataclasses.replace(WORK, accumulation_steps=3), compiled=False)
    done = []
    step.run.model.register_forward_hook(lambda *_: done.append("forward"))
    monkeypatch.setattr(step.run.optimizer, "step", lambda: done.append("update"))
    step.step()
    assert done == ["forward", "forward", "forward", "update"]


def test_a_contender_that_recomputes_does():
    step = build(Contender("ours", False, recompute="selective"), WORK)
    assert {block.recompute for block in step.run.model.layers} == {"selective"}


def test_a_gradient_that_is_not_finite_is_no_step(monkeypatch):
    step = OurStep(WORK, compiled=False)
    monkeypatch.setattr(step.run.accelerator, "clip_grad_norm_", lambda *_: torch.tensor(math.nan))
    with pytest.raises(FloatingPointError, match="norm is nan"):
        step.step()


def test_a_run_leaves_nothing_on_the_disk(tmp_path):
    step = OurStep(WORK, compiled=False)
    step.step()
    assert list(tmp_path.iterdir()) == []
    assert not step.run.folder.path.exists()


def test_only_compiled_contenders_compile(monkeypatch):
    compiled = []
    monkeypatch.setattr(setup, "compile_blocks", compiled.append)
    OurStep(WORK, compiled=False)
    assert compiled == []
    OurStep(WORK, compiled=True)
    assert len(compiled) == 1
