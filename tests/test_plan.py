"""Scripts.plan: the arithmetic by hand, the page by a golden text, mistakes in one line."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model import LMConfig
from scripts import plan as script
from training import plan, plan_page
from training.engine.communication import traffic
from training.engine.kinds import ENGINES
from training.engine.memory import GIB, OVERHEAD, expect
from training.engine.workload import Parameters, Workload

KINDS = {kind.config: kind for kind in ENGINES}
GOLDEN = Path(__file__).parent / "fixtures" / "plan.txt"
SHAPE = ["--dim", "256", "--n_layers", "4", "--n_heads", "4", "--max_seq_len", "512"]
STEP = ["--batch_size", "16", "--accumulation_steps", "8", "--num_processes", "4,32,1024"]
MACHINE = ["--gpu_memory", "2", "--ram", "64", "--device", "RTX 4090", "--tokens", "1e9"]
N = 10**9
COUNTED = Parameters(N, N, N // 4, {N // 4: 4}, flops_per_token=6 * N)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def workload(**changes) -> Workload:
    values = {"dtype": "bfloat16", "batch_size": 8, "accumulation_steps": 4, "processes": 4}
    return Workload(LMConfig(max_seq_len=100), COUNTED, **values | changes)


def machine(**changes) -> plan.Machine:
    values = {"room": None, "ram": None, "per_machine": 8, "flops": 1e14}
    return plan.Machine(**values | {"bandwidth": 1e9, "host_bandwidth": 1e9} | changes)


def page(*flags: str) -> str:
    return plan_page.describe(script.parse_options([*flags]))


def test_the_page_is_what_it_was():
    assert page(*SHAPE, *STEP, *MACHINE) + "\n" == GOLDEN.read_text(encoding="utf-8")


def test_the_largest_micro_batch_is_the_last_that_fits():
    work, kind = workload(), KINDS["zero2"]
    room = expect(kind, work.but(batch_size=37)).peak + OVERHEAD
    assert plan.largest_batch(kind, work, room) == 37
    assert plan.largest_batch(kind, work, room - 1) == 36
    assert plan.largest_batch(kind, work, 0) == 0


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "zero2_offload"])
def test_the_first_engine_in_the_order_of_the_advice_that_fits_is_taken(name):
    work = workload(processes=64)
    room = expect(KINDS[name], work).peak + OVERHEAD
    earlier = ENGINES[: ENGINES.index(KINDS[name])]
    found = plan.fastest(work, machine(room=room))
    least = min(earlier, key=lambda kind: expect(kind, work).peak, default=None)
    if least and expect(least, work).peak + OVERHEAD <= room:
        assert found.kind in earlier
    else:
        assert found.kind == KINDS[name]
        assert found.work.recompute == "off"


def test_half_of_the_batch_comes_before_recomputing_and_that_before_offload():
    work = workload(processes=64, batch_size=64)
    rooms = {
        (half, what): min(
            expect(kind, work.but(batch_size=64 // half, recompute=what)).peak + OVERHEAD
            for kind in ENGINES
            if not kind.offloads
        )
        for half in (1, 2, 64)
        for what in ("off", "blocks")
    }
    found = plan.fastest(work, machine(room=rooms[2, "off"]))
    assert 32 <= found.most < 64
    assert (found.work.recompute, found.kind.offloads) == ("off", False)
    found = plan.fastest(work, machine(room=rooms[64, "off"] - 1))
    assert (found.work.recompute, found.kind.offloads) == ("blocks", False)
    found = plan.fastest(work, machine(room=rooms[64, "blocks"] - 1))
    assert found.kind.offloads
    assert plan.fastest(work, machine(room=OVERHEAD)) is None


def test_an_engine_whose_host_memory_is_not_there_is_passed_over():
    work = workload(processes=8)
    room = expect(KINDS["zero2_offload"], work).peak + OVERHEAD
    needs = plan.ram_of_machine(KINDS["zero2_offload"], work, 8)
    host = expect(KINDS["zero2_offload"], work).host
    assert needs == 8 * (host + OVERHEAD) + 12 * N  # and a checkpoint on its way to the disk
    assert plan.ram_of_machine(KINDS["zero2_offload"], work, 4) == 4 * (host + OVERHEAD) + 12 * N
    with_ram = plan.fastest(work, machine(room=room, ram=needs))
    without = plan.fastest(work, machine(room=room, ram=20 * GIB))
    assert with_ram is not None
    assert without is None or not without.kind.offloads


def test_a_global_batch_is_shared_in_micro_batches_no_larger_than_before():
    work = workload(batch_size=24, accumulation_steps=32)
    for processes, batch in ((4, (24, 32)), (64, (24, 2)), (128, (24, 1)), (512, (6, 1))):
        each = plan.shared(work, 24 * 32 * 4, processes)
        assert (each.batch_size, each.accumulation_steps) == batch
        assert each.processes == processes
    assert plan.shared(work, 3072, 4096) is None


def test_a_step_takes_its_flops_and_what_it_waits_for():
    work = workload()
    computing, waiting = plan.step_seconds(KINDS["ddp"], work, machine())
    assert computing == pytest.approx(8 * 100 * 4 * 6 * N / 1e14)
    sent = 4 * N * 2 * 3 / 4
    assert traffic(KINDS["ddp"], work).sent == sent
    # Behind the last of 4 backward passes, two thirds of a micro-batch.
    assert waiting == pytest.approx(sent / 1e9 - computing / 4 * 2 / 3)


def test_an_engine_stops_scaling_where_the_exchange_takes_longer_than_the_share():
    work = workload(accumulation_steps=64)
    slow, fast = machine(), machine(bandwidth=1e15, host_bandwidth=1e15)
    end = plan.stops_scaling(KINDS["ddp"], work, 8 * 64 * 4, slow)
    computing, waiting = plan.step_seconds(KINDS["ddp"], end, slow)
    assert waiting > computing
    before = plan.shared(work, 8 * 64 * 4, end.processes // 2)
    computing, waiting = plan.step_seconds(KINDS["ddp"], before, slow)
    assert end.processes == 4 or waiting <= computing
    assert plan.stops_scaling(KINDS["ddp"], work, 8 * 64 * 4, fast) is None


@pytest.mark.parametrize("processes", [1, 4, 16])
def test_deepspeeds_estimates_are_deepspeeds(processes):
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    work = workload(processes=processes)
    here, machines = min(8, processes), max(1, processes // 8)
    layout = {"num_gpus_per_node": here, "num_nodes": machines}
    for name, offload in (("zero2", False), ("zero2_offload", True)):
        cpu, gpu = estimate_zero2_model_states_mem_needs(N, cpu_offload=offload, **layout)
        found = plan.deepspeed_states(KINDS[name], work, 8)
        assert found == pytest.approx((gpu, cpu))
    for name, offload in (("zero3", False), ("zero3_offload", True)):
        options = {"cpu_offload": offload, "cpu_offload_params": offload} | layout
        cpu, gpu, _ = estimate_zero3_model_states_mem_needs(N, N // 4, **options)
        assert plan.deepspeed_states(KINDS[name], work, 8) == pytest.approx((gpu, cpu))
    assert plan.deepspeed_states(KINDS["ddp"], work, 8) is None


def test_tokens_are_those_asked_for_or_of_the_steps_or_twenty_per_parameter():
    n = Parameters.of(LMConfig(dim=256, n_layers=4, n_heads=4, max_seq_len=512)).total
    assert f"{20 * n / 1e9:.3g} billion in" in page(*SHAPE)
    assert "tokens: 0.000819 billion in 100 steps" in page(
        *SHAPE, "--max_steps", "100", "--batch_size", "16"
    )
    assert "tokens: 7 billion in" in page(*SHAPE, "--max_steps", "100", "--tokens", "7e9")


def test_without_a_gpu_and_its_memory_the_plan_is_for_this_cpu(monkeypatch):
    monkeypatch.setattr(plan_page, "free_memory", lambda device: 64 * GIB)
    said = page(*SHAPE, "--num_processes", "2")
    assert "memory: 32.0 GiB for a process (found), 64.0 GiB of RAM" in said
    assert "fastest that fits: DDP" in said
    assert "hours take a --device whose peak is known" in said
    monkeypatch.setattr(plan_page, "free_memory", lambda device: None)
    assert "say --gpu_memory" in page(*SHAPE)


def test_too_many_processes_for_the_batch_are_said_and_not_divided_by():
    said = page(*SHAPE, "--batch_size", "2", "--num_processes", "1,4", *MACHINE)
    assert said.count("any: more than the batch has sequences") == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--num_processes 0", "--num_processes: whole numbers from 1 on, not '0'"),
        ("--num_processes 8,,64", "whole numbers from 1 on, not '8,,64'"),
        ("--num_processes many", "whole numbers from 1 on"),
        ("--gpu_memory -1", "--gpu_memory: a positive number, not '-1'"),
        ("--gpu_memory inf", "a positive number, not 'inf'"),
        ("--gpu_memory lots", "a positive number, not 'lots'"),
        ("--mfu 40", "--mfu: a share, from 0 to 1, not '40'"),
        ("--mfu 0", "a positive number"),
        ("--tokens nan", "a positive number, not 'nan'"),
        ("--bandwidth 0", "--bandwidth: a positive number"),
        ("--device RTX4090", "--device RTX4090: its peak in bf16 is not known, but that of GB200"),
        ("--device T4", "--device T4: its peak in bf16 is not known"),
        ("--dim 7", "dim 7 is not divisible by n_heads 8"),
        ("--vocab_size 0", "vocab_size must be a positive whole number, not 0"),
        ("--batch_size 0", "--batch_size must be at least 1, not 0"),
        ("--processes_per_machine 4,8", "--processes_per_machine takes one number"),
        ("--gpu_mem 24", "unrecognized argument --gpu_mem: did you mean --gpu_memory?"),
    ],
)
def test_nonsense_ends_in_one_line(flags, says, capsys):
    with pytest.raises(SystemExit) as ended:
        script.main(flags.split())
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("plan: error: ")
    assert says in error
    assert error.count("\n") == 1


def test_neither_deepspeed_nor_accelerate_is_imported():
    code = "import sys, scripts.plan; sys.exit(bool({'deepspeed', 'accelerate'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=GOLDEN.parents[2]).returncode == 0
