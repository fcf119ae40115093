"""Warnings before training, with amounts of memory that the tests set. main(argv) restores signal
handlers, sys.argv and the environment when it returns."""

import json
import math
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import TINY, pack

from lm.common.numbers import memory
from lm.data.dataset import PackedDataset
from lm.data.shards import TEXT
from lm.engine.engine import Engine
from lm.engine.hardware import GIB
from lm.engine.memory import MARGIN, OVERHEAD, estimate
from lm.engine.strategy import DDP
from lm.storage.checkpoint import read_state
from lm.storage.find import find_run
from lm.storage.folder import RunFolder, lock
from lm.training import set_up, start_block
from lm.training.arguments import SFTArguments, TrainingArguments
from lm.training.inputs import Inputs, shapes_of
from lm.training.run import Run
from lm.training.starting_point import StartingPoint
from model import LMConfig
from train_pretrain_accelerate import main

CONFIG = LMConfig()


@pytest.fixture
def run_of(monkeypatch, tmp_path):
    """Makes a run of two processes under ZeRO-2. Each process can use `available` bytes."""

    def make(available=2**60, device="cpu", offload=False, args=None, emulates=False, **changes):
        args = args or TrainingArguments(accumulation_steps=8)
        zero = {"stage": 2} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
        file = {"zero_optimization": zero, "data_types": {"grad_accum_dtype": "fp32"}}
        accelerator = SimpleNamespace(num_processes=2, device=torch.device(device))
        monkeypatch.setattr(start_block, "available_memory", lambda device, processes: available)
        monkeypatch.setattr(start_block, "cpu_emulates_bf16", lambda: emulates)
        inputs = {
            **{"args": args, "start": StartingPoint(RunFolder(tmp_path)), "source": None},
            **{"teacher": None, "train_set": SimpleNamespace(kind=TEXT), "val_set": 1},
            **{"config": CONFIG, "shapes": shapes_of(CONFIG, args), "identity": {}},
        }
        inputs = Inputs(**inputs | {"total_steps": 1000} | changes)
        return SimpleNamespace(
            args=args,
            engine=Engine(accelerator, "DeepSpeed ZeRO-2", file),
            accelerator=accelerator,
            folder=RunFolder(tmp_path),
            inputs=inputs,
            work=inputs.workload(2, accelerator.device, compiled=False),
        )

    return make


def enough_for(run) -> int:
    """Return enough bytes for a process of the run: at most one more than it needs."""
    device = run.accelerator.device
    needed = estimate(run.engine.strategy, run.work)
    margin = 1 if device.type == "cpu" else MARGIN
    return int(needed.held + needed.working * margin + OVERHEAD) + 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_too_little_memory_is_warned_of_with_the_flags_that_help(run_of, monkeypatch, device):
    """The process with the least memory decides."""
    enough = enough_for(run_of(device=device))
    assert start_block.warnings(run_of(enough, device)) == []
    (line,) = start_block.warnings(run_of(enough - 2, device))
    assert line.startswith("WARNING: a process may need ")
    assert f", but has only {(enough - 2) / GIB:.2f} GiB: to use less memory, try a " in line
    monkeypatch.setattr(Engine, "largest", lambda self, mine, *how: max(mine, -(enough - 2)))
    assert start_block.warnings(run_of(2 * enough, device)) == [line]


def test_too_little_ram_for_offloaded_tensors_is_warned_of(run_of, monkeypatch):
    run = run_of(device="cuda", offload=True)
    needed = int(estimate(run.engine.strategy, run.work).ram)
    for spare, warned in ((1, False), (-1, True)):
        memory = {"cuda": 2**60, "cpu": needed + spare}
        monkeypatch.setattr(
            start_block, "available_memory", lambda device, n, m=memory: m[device.type]
        )
        lines = start_block.warnings(run)
        assert ["each process offloads" in line for line in lines] == [True] * warned


def test_a_run_on_one_gpu_says_how_much_memory_it_would_save_without_an_engine(run_of):
    """Bytes per parameter: ZeRO-2 18 + 4 (buckets), DDP 16 + 2 (bf16 copy). `coalesces` adds 4."""
    run = run_of(device="cuda", args=TrainingArguments(dtype="bfloat16"))
    strategy, n = run.engine.strategy, run.inputs.shapes.num_parameters()
    for processes, device, engine, saved in (
        (1, "cuda", strategy, 4 * n),
        (1, "cuda", replace(strategy, coalesces=True), 8 * n),
        (1, "cuda", replace(strategy, optimizer_on="cpu"), 0),
        (1, "cuda", DDP, 0),
        (1, "cpu", strategy, 0),
        (2, "cuda", strategy, 0),
    ):
        work = run.inputs.workload(processes, torch.device(device), compiled=True)
        said = f"`python train_pretrain_accelerate.py` needs about {memory(saved)} less"
        text = start_block.without_engine(engine, work)
        assert said in text if saved else text == ""


def test_the_memory_of_a_teacher_is_counted(run_of):
    shapes = shapes_of(LMConfig(dim=128, n_layers=2), TrainingArguments())
    teacher = SimpleNamespace(shapes=shapes, zero=None)
    needed = enough_for(run_of(teacher=teacher))
    assert needed > enough_for(run_of()) + 2 * shapes.num_parameters()


def test_bf16_on_a_cpu_that_emulates_it_is_warned_of(run_of):
    for dtype, warned in (("bfloat16", True), ("float32", False)):
        lines = start_block.warnings(run_of(emulates=True, args=TrainingArguments(dtype=dtype)))
        assert ["--dtype float32 is many times" in line for line in lines] == [True] * warned


@pytest.mark.parametrize(
    ("args", "cause", "how"),
    [
        (TrainingArguments(), "is shorter than one sequence", "smaller"),
        (SFTArguments(data="x"), "has no conversation that fits", "larger"),
    ],
)
def test_data_without_a_validation_split_give_a_warning(run_of, args, cause, how):
    (line,) = start_block.warnings(run_of(val_set=None, args=args))
    assert line.startswith(f"NO VALIDATION: the validation split {cause} (--max_seq_len ")
    assert f"Pass a {how} --max_seq_len" in line


@pytest.mark.parametrize(("trained", "resumed"), [(256, False), (256, True), (512, False)])
def test_positions_that_were_never_trained_are_warned_of(run_of, tmp_path, trained, resumed):
    """The run has 512 positions, the default of LMConfig."""
    config = LMConfig(max_seq_len=trained)
    source = SimpleNamespace(path=Path("out/runs/short/weights"), config=lambda: config)
    begin = StartingPoint(RunFolder(tmp_path), checkpoint=tmp_path if resumed else None)
    lines = start_block.warnings(run_of(source=source, start=begin))
    warned = trained < CONFIG.max_seq_len and not resumed
    said = "WARNING: out/runs/short/weights was trained on 256 positions, but this run has 512"
    assert [line.startswith(said) for line in lines] == [True] * warned


def test_a_folder_that_other_machines_do_not_see_is_warned_of(run_of, monkeypatch):
    monkeypatch.setattr(Engine, "total", lambda self, mine, *how: mine + 1)
    (line,) = start_block.warnings(run_of())
    assert "not every machine sees" in line


@pytest.fixture
def flags(packed, tmp_path):
    """Makes the flags of a tiny run called `name`."""

    def of(name: str, *more: str) -> list[str]:
        where = ("--data", str(packed), "--out_dir", str(tmp_path), "--run_name", name)
        return [*TINY, *where, "--eval_samples", "8", "--max_steps", "2", *more]

    return of


def last_saved_step(run: Path) -> int:
    return read_state(max((run / "checkpoints").glob("step-*[0-9]")))["step"]


def test_main_can_be_called_again_and_restores_the_process(flags, tmp_path, capsys):
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    command, environ = list(sys.argv), os.environ.copy()
    Accelerator(mixed_precision="no", cpu=True)  # other code in the process has made one
    threads = torch.get_num_threads()
    main(flags("a", "--dtype", "bfloat16", "--threads", str(threads + 1)))
    assert f" device: CPU, {threads + 1} threads per process\n" in capsys.readouterr().out
    assert torch.get_num_threads() == threads
    with pytest.raises(SystemExit) as ended:
        main(flags("b", "--dim", "33"))
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "dim 33 is not divisible by n_heads 4" in said
    main(flags("b", "--dtype", "float32"))
    main(flags("a", "--resume", str(tmp_path / "a"), "--max_steps", "3"))
    assert last_saved_step(tmp_path / "a") == 3
    assert (tmp_path / "b" / "weights").exists()
    lock(tmp_path / "a" / "lock")  # the run has released its lock
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert (sys.argv, os.environ) == (command, environ)
    settings = (tmp_path / "a" / "settings.json").read_text(encoding="utf-8")
    assert '"train_pretrain_accelerate.py",\n    "--dim",' in settings
    assert sys.argv[0] not in settings
    threads = json.loads((tmp_path / "b" / "settings.json").read_text())["arguments"]["threads"]
    assert threads >= 1  # the number in use, although it was not typed


def test_runs_of_one_second_have_their_own_folders_with_the_mode_of_umask(
    packed, tmp_path, monkeypatch
):
    monkeypatch.setattr("lm.training.starting_point.time.strftime", lambda *given: "now")
    before = os.umask(0o002)
    try:
        for _ in range(3):
            main([*TINY, "--data", str(packed), "--out_dir", str(tmp_path), "--max_steps", "1"])
    finally:
        os.umask(before)
    runs = [tmp_path / name for name in ("now", "now-2", "now-3")]
    assert all((run / "weights").exists() for run in runs)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()} == {
        0o664
    }
    for run in runs[:2]:
        os.utime(run, (2e9, 2e9))  # as `cp -r` does
    assert find_run("auto", tmp_path) == runs[2]


def test_compiled_code_of_one_call_is_dropped_before_the_next():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    def double(x):
        return x * 2

    for _ in range(2):
        with set_up.notebook_process(["program"]):
            torch.compile(double, backend=backend)(torch.ones(3))
    assert len(compiled) == 2


def test_noise_is_the_same_however_a_step_is_divided(flags, corpus, tmp_path, capsys):
    """The start block counts one segmentation as an epoch."""
    data = pack(corpus, tmp_path / "data", val_fraction=0, segmentations=3)

    def losses(name: str, *more: str) -> list[float]:
        main(flags(name, "--data", str(data), "--max_steps", "3", "--dtype", "float32", *more))
        rows = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        return [row["loss"] for row in rows if "loss" in row]

    noise = ("--token_noise", "0.3")
    clean, noisy = losses("clean"), losses("noisy", *noise)
    block, n = capsys.readouterr().out, math.ceil(len(PackedDataset(data, "train", 32)) / 3)
    said = f" tokens in 3 segmentations, an epoch is {n:,} sequences of 32"
    assert f"{said}; 0.3 of the input tokens replaced, except in the first segmentation" in block
    assert f"steps: 3 ({3 * 8 / n:.2f} epochs)" in block
    assert not any(a == pytest.approx(b, abs=1e-4) for a, b in zip(clean, noisy, strict=True))
    divided = ["--batch_size", "2", "--accumulation_steps", "4", "--num_workers", "1"]
    assert losses("divided", *noise, *divided) == pytest.approx(noisy, abs=1e-4)


def test_the_start_block_names_the_rates_of_all_layers_and_the_pieces_in_the_loss(flags, capsys):
    rates = "--muon_learning_rate 0.03 --muon_momentum 0.9 --learning_rate 0.02"
    ends = "--embedding_lr_factor 3 --no-tie_embeddings --output_lr_factor 0.5 --min_lr_ratio 0.1"
    loss = "--lr_schedule linear --sampled_softmax 8"
    main(flags("a", "--optimizer", "muon", *f"{rates} {ends} {loss}".split()))
    block = capsys.readouterr().out
    assert "loss: over a micro-batch's targets and 1/8 of the other pieces, an estimate" in block
    muon = "Muon on 14 matrices at learning rate 0.03 and momentum 0.9"
    rest = "AdamW on the rest, embedding at 3 × its rate, output layer at 0.5 × its rate"
    assert f"optimizer: {muon}, {rest}\n" in block
    assert "learning rate 0.02 after 0 warm-up steps, linear, 0.002 in the last step\n" in block


def test_an_interrupted_main_saves_and_says_how_to_resume(flags, tmp_path, capsys, monkeypatch):
    run, steps, update = tmp_path / "a", [], Run.update

    def interrupted(run: Run):
        steps.append(run)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)  # two signals at once count as one
        return update(run)

    monkeypatch.setattr(Run, "update", interrupted)
    main(flags("a", "--max_steps", "100000"))
    assert len(steps) == last_saved_step(run) == 3
    stopped = "stopped by SIGINT after step 3, saved; to go on:\n"
    said, found, command = capsys.readouterr().out.partition(stopped)
    assert found
    assert re.search(r"^ +memory: about [\d.]+ MB per process expected, plus", said, re.M)
    assert f"report: {run / 'report.html'}" in said
    assert ">not finished</td>" in (run / "report.html").read_text(encoding="utf-8")
    assert command.split()[1:3] == ["train_pretrain_accelerate.py", "--dim"]
    main(flags("a", "--max_steps", "4", "--resume", str(run)))
    assert last_saved_step(run) == 4
