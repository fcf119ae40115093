"""Scripts.plan: the arithmetic by hand, the page by a golden text, mistakes in one line."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model import LMConfig
from scripts import plan as script
from training import plan, plan_page
from training.engine.communication import traffic
from training.engine.kinds import engines
from training.engine.memory import GIB, OVERHEAD, expect
from training.engine.memory import needs as needed
from training.engine.workload import Parameters, Workload

ENGINES = engines(LMConfig().dim)
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
    return Workload(LMConfig(max_seq_len=100), **{"parameters": COUNTED} | values | changes)


def machine(**changes) -> plan.Machine:
    values = {"room": None, "ram": None, "per_machine": 8, "flops": 1e14}
    return plan.Machine(**values | {"bandwidth": 1e9, "host_bandwidth": 1e9} | changes)


def page(*flags: str) -> str:
    return plan_page.describe(script.parse_options([*flags]))


def test_the_page_is_what_it_was():
    assert page(*SHAPE, *STEP, *MACHINE) + "\n" == GOLDEN.read_text(encoding="utf-8")


def test_the_largest_micro_batch_is_the_last_that_fits():
    work, kind = workload(), KINDS["zero2"]
    room = needed(kind, work.but(batch_size=37))
    assert plan.largest_batch(kind, work, machine(room=room)) == 37
    assert plan.largest_batch(kind, work, machine(room=room - 1)) == 36
    assert plan.largest_batch(kind, work, machine(room=0)) == 0
    assert plan.largest_batch(kind, work, machine(room=room, ram=GIB)) == 0  # nor without RAM


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "zero2_offload"])
def test_the_first_engine_in_the_order_of_the_advice_that_fits_is_taken(name):
    work = workload(processes=64)
    room = needed(KINDS[name], work)
    earlier = ENGINES[: ENGINES.index(KINDS[name])]
    found = plan.fastest(work, machine(room=room))
    if any(needed(kind, work) <= room for kind in earlier):
        assert found.kind in earlier
    else:
        assert found.kind == KINDS[name]
        assert found.work.recompute == "off"


def test_half_of_the_batch_comes_before_recomputing_and_that_before_offload():
    work = workload(processes=64, batch_size=64)
    rooms = {
        (half, what): min(
            needed(kind, work.but(batch_size=64 // half, recompute=what))
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
    room = needed(KINDS["zero2_offload"], work)
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
    large = plan.shared(workload(batch_size=10**9), 10**9, 2)
    assert (large.batch_size, large.accumulation_steps) == (5 * 10**8, 1)


def test_a_step_takes_its_flops_and_what_it_waits_for():
    work = workload()
    computing, waiting = plan.step_seconds(KINDS["ddp"], work, machine())
    assert computing == pytest.approx(8 * 100 * 4 * 6 * N / 1e14)
    sent = 4 * N * 2 * 3 / 4
    assert traffic(KINDS["ddp"], work).sent == sent
    # Behind the last of 4 backward passes, two thirds of a micro-batch.
    assert waiting == pytest.approx(sent / 1e9 - computing / 4 * 2 / 3)


def test_what_is_recomputed_takes_time_too():
    work = workload(recompute="blocks")
    off, again = (plan.step_seconds(KINDS["ddp"], w, machine())[0] for w in (workload(), work))
    config = work.config
    attention = 4 * config.n_heads * config.head_dim * 100
    blocks = config.n_layers * (2 * COUNTED.block + attention)
    assert again / off == pytest.approx(1 + blocks / COUNTED.flops_per_token)
    selective = work.but(recompute="selective")
    assert plan.recomputed(selective) == config.n_layers * 2 * COUNTED.block
    plain = selective.but(keeps_scores=True)  # attention is computed again as well
    assert plan.recomputed(plain) == plan.recomputed(work)


def test_of_a_real_model_recomputing_takes_a_third_more_but_for_the_output_layer():
    config = LMConfig(dim=1024, n_layers=32, max_seq_len=1024)
    work = workload(parameters=Parameters.of(config), recompute="blocks")
    share = plan.recomputed(replace(work, config=config)) / work.parameters.flops_per_token
    assert 0.32 < share < 1 / 3


def test_an_engine_that_refuses_muon_is_neither_chosen_nor_shown():
    work = workload(processes=64, parameters=replace(COUNTED, by_muon=N // 2))
    rooms = [needed(kind, work.but(recompute="blocks", batch_size=1)) for kind in ENGINES]
    assert plan.fastest(work, machine(room=rooms[2])).kind.takes_muon
    assert plan.fastest(work, machine(room=rooms[3] - GIB)) is None
    said = page(*SHAPE, *STEP, *MACHINE, "--optimizer", "muon")
    assert "ZeRO-2 " in said
    assert "ZeRO-3 " not in said
    assert "on the CPU" not in said


def test_where_an_engine_stops_scaling_and_why_is_in_the_table():
    flags = (*SHAPE, *STEP, *MACHINE)
    rows = [line.split() for line in page(*flags, "--bandwidth", "0.1").splitlines()]
    ddp = [row for row in rows if row[:1] == ["DDP"]][1:]
    assert [row[-4] for row in ddp] == ["gradients"] * 2
    assert int(ddp[0][-2][:-1]) < int(ddp[1][-2][:-1]) > 50
    assert "where waiting passes 50%, more of them do not help" in page(*flags)


def test_deepspeeds_estimates_stand_where_it_has_them():
    work = workload(processes=16)
    # DeepSpeed's: 2 bytes of weights and 18 of the rest, on 16 GPUs of 2 machines
    assert plan.deepspeed_states(KINDS["zero2"], work, 8) == (2 * N + 18 * N / 16, 1.5 * 4 * N * 8)
    gpu, ram = plan.deepspeed_states(KINDS["zero3_offload"], work, 8)
    assert (gpu, ram) == (4 * N / 4, 1.5 * 18 * N / 2)
    for name, of in (("ddp", work), ("zero_infinity", work), ("zero2", work.but(dtype="float32"))):
        assert plan.deepspeed_states(KINDS[name], of, 8) is None


def test_the_ram_that_is_missing_is_said_in_every_row():
    said = page(*SHAPE, *STEP, "--gpu_memory", "2", "--ram", "4.1")
    assert "fastest that fits: none" not in said
    said = page(*SHAPE, *STEP, "--gpu_memory", "24", "--ram", "1")
    assert "fastest that fits: none" in said
    assert " yes " not in said


@pytest.mark.parametrize(
    ("flags", "ddp", "zero3"),
    # 2 × 2 bytes of 6,400 logits for each of 16 × 512 tokens; not fused, 12
    [("", 0.20, 0.59), ("--compile on", 0.20, 0.59), ("--compile off", 0.59, 0.59)],
)
def test_a_gpu_compiles_unless_it_is_told_not_to_but_not_under_zero_3(flags, ddp, zero3):
    lines = page(*SHAPE, *STEP, *MACHINE, *flags.split()).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("engine"))
    rows = {line.split()[0]: line.split() for line in lines[first + 1 : first + 5]}
    assert float(rows["DDP"][6]) == ddp
    assert float(rows["ZeRO-3"][6]) == zero3


def test_a_batch_that_cannot_be_divided_is_said_to_be_smaller():
    said = page(*SHAPE, "--batch_size", "1", "--accumulation_steps", "7", "--num_processes", "1,2")
    assert "1 × 7 " in said
    assert "1 × 3 (6 in all)" in said
    assert "accumulation × 1 process =" in said


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
        ("--num_processes 1" + 30 * "0", "whole numbers from 1 on"),
        ("--gpu_memory 1e300", "a positive number, at most 1e+18, not '1e300'"),
        ("--ram 1e300", "a positive number, at most 1e+18, not '1e300'"),
        ("--device H100", "--device H100: say its --gpu_memory too, in GiB"),
        ("--epochs 7", "unrecognized argument --epochs"),
        ("--resume auto --lr 1", "unrecognized arguments: --resume, --lr"),
        (
            "--deepspeed ds_config.json --init_from none",
            "unrecognized arguments: --deepspeed (the launcher",
        ),
        ("--tf32 --gpu_memory 24", "--tf32, which is for float32"),
        ("--dtype float16", "--dtype float16 and --tf32, which is for float32, take a GPU"),
        ("--num_processes many", "whole numbers from 1 on"),
        ("--gpu_memory -1", "--gpu_memory: a positive number, at most 1e+18, not '-1'"),
        ("--gpu_memory inf", "a positive number, at most 1e+18, not 'inf'"),
        ("--gpu_memory lots", "a positive number, at most 1e+18, not 'lots'"),
        ("--mfu 40", "--mfu: a share, from 0 to 1, not '40'"),
        ("--mfu 0", "a positive number"),
        ("--tokens nan", "a positive number, at most 1e+18, not 'nan'"),
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
