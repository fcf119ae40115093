import mmap
import sys
from dataclasses import replace

import pytest
import torch
from conftest import REPOSITORY

from model import LMConfig
from training.engine import memory
from training.engine.communication import traffic
from training.engine.deepspeed_config import read_config
from training.engine.kinds import DDP, FILES, Kind, engines, kind_of
from training.engine.memory import (
    FIRST_STEP,
    OVERHEAD,
    MemoryPlan,
    available_memory,
    expect,
    fits,
    live_parameters,
    needs,
    stays,
)
from training.engine.workload import Beside, Parameters, Workload

CONFIG = LMConfig(dim=64, n_layers=2, n_heads=4, vocab_size=100, max_seq_len=32)
ENGINES = engines(CONFIG.dim)
KINDS = {kind.config: kind for kind in ENGINES}
N = 1_000_000
COUNTED = Parameters(N, N, N // 4, {100: 40, N // 4: 4}, flops_per_token=6 * N)
FROZEN = replace(COUNTED, matrices=N // 100, frozen=N - N // 100)  # all but adapters


def workload(**changes) -> Workload:
    values = {"dtype": "bfloat16", "batch_size": 1, "accumulation_steps": 4, "processes": 4}
    return Workload(CONFIG, **{"parameters": COUNTED} | values | changes)


@pytest.mark.parametrize(
    ("dtype", "engine", "processes", "bytes_per_parameter"),
    [
        # without DeepSpeed: fp32 weights 4, gradients 4, moments 8; DDP adds them up beside buckets
        ("bfloat16", "ddp", 1, (4, 4, 8)),
        ("bfloat16", "ddp", 4, (4, 8, 8)),
        ("float32", "ddp", 4, (4, 8, 8)),
        # 16 bits: weights 2, accumulated gradients 4, stepped weights 4 and moments 8
        ("bfloat16", "zero1", 1, (2, 4, 12)),
        ("bfloat16", "zero1", 4, (2, 4, 3)),
        ("bfloat16", "zero2", 1, (2, 4, 12)),
        ("bfloat16", "zero2", 4, (2, 1, 3)),
        ("float16", "zero2", 4, (2, 1, 3)),
        ("bfloat16", "zero3", 4, (0.5, 1, 3)),
        ("bfloat16", "zero2_offload", 4, (2, 1, 0)),
        # fp32: twice the weights; ZeRO-3 steps them as they are
        ("float32", "zero2", 1, (4, 4, 12)),
        ("float32", "zero2", 4, (4, 1, 3)),
        ("float32", "zero3", 4, (1, 1, 2)),
    ],
)
def test_weights_gradients_and_moments_by_hand(dtype, engine, processes, bytes_per_parameter):
    plan = expect(KINDS[engine], workload(dtype=dtype, processes=processes))
    whole = 0
    if engine == "zero3":  # and what it has not let go of, which is all of so small a model
        whole = N * (4 if dtype == "float32" else 2)
    parts = (plan.parameters - whole, plan.gradients, plan.optimizer)
    assert parts == pytest.approx(tuple(N * each for each in bytes_per_parameter))


def test_the_table_of_docs_engines_is_what_is_reckoned():
    text = (REPOSITORY / "docs" / "engines.md").read_text(encoding="utf-8")
    rows = [[cell.strip(" `") for cell in line.split("|")[1:6]] for line in text.splitlines()]
    table = {row[0]: row[2:] for row in rows if row and row[0] in KINDS}
    assert table.keys() == KINDS.keys()
    for name, kind in KINDS.items():
        for processes in (1, 4, 16):
            work = workload(processes=processes)
            plan, whole = expect(kind, work), 2 * live_parameters(kind, work)
            buffers = 5 * 2 * 50_000_000 + 4 * 4 * N // processes if name == "zero_infinity" else 0
            held = plan.held - (whole if kind.stage == 3 else 0)
            if (name, processes) == ("ddp", 1):
                held += 4 * N  # it has no buckets then
            said = [eval(cell, {"P": processes}) for cell in table[name]]
            assert [held, plan.host - buffers, plan.nvme] == pytest.approx([N * s for s in said])


def test_muon_keeps_one_moment_less():
    half = Parameters(N, N, N // 4, {N // 4: 4}, flops_per_token=6 * N, by_muon=N // 2)
    for engine, processes in (("ddp", 4), ("zero1", 1)):
        adamw, muon = (
            expect(KINDS[engine], workload(processes=processes, parameters=counted)).optimizer
            for counted in (COUNTED, half)
        )
        assert adamw - muon == 2 * N


def test_a_gradient_that_nothing_is_added_to_comes_as_activations_go():
    alone = workload(processes=1, accumulation_steps=1)
    plan, adding = (expect(DDP, work) for work in (alone, alone.but(accumulation_steps=2)))
    assert (plan.gradients, plan.buffers) == (0, 4 * N)
    assert (adding.gradients, adding.buffers) == (4 * N, 0)
    assert plan.peak <= adding.peak
    # DDP's buckets stay, and what is added up before the last micro-batch lies beside them.
    assert expect(DDP, alone.but(processes=2)).gradients == 4 * N
    assert expect(DDP, alone.but(processes=2, accumulation_steps=2)).gradients == 8 * N


@pytest.mark.parametrize(
    ("dtype", "engine", "processes", "bytes_per_trained", "bytes_per_frozen"),
    [
        ("bfloat16", "ddp", 1, (4, 4, 8), 2),
        ("bfloat16", "ddp", 4, (4, 8, 8), 2),
        ("float32", "ddp", 4, (4, 8, 8), 4),
        ("bfloat16", "zero1", 4, (2, 4, 3), 2),
        ("bfloat16", "zero2", 4, (2, 1, 3), 2),
        ("float32", "zero2", 4, (4, 1, 3), 4),
    ],
)
def test_what_is_frozen_is_there_once_in_the_training_precision(
    dtype, engine, processes, bytes_per_trained, bytes_per_frozen
):
    work = workload(dtype=dtype, processes=processes, parameters=FROZEN)
    plan = expect(KINDS[engine], work)
    parts = (plan.parameters - bytes_per_frozen * FROZEN.frozen, plan.gradients, plan.optimizer)
    assert parts == tuple(N // 100 * each for each in bytes_per_trained)
    assert plan.checkpoint == 12 * N // 100


@pytest.mark.parametrize("kind", ENGINES, ids=KINDS)
def test_with_adapters_every_engine_holds_and_sends_less(kind):
    whole, adapters = workload(), workload(parameters=FROZEN)
    assert expect(kind, adapters).peak < expect(kind, whole).peak
    assert traffic(kind, adapters).sent < traffic(kind, whole).sent


PARTS = {"parameters": 1, "gradients": 2, "optimizer": 4, "activations": 100, "logits": 30}


def test_the_peak_is_the_worst_moment_and_not_the_sum():
    plan = MemoryPlan(**PARTS, block=10, buffers=15, at_once=False)
    assert plan.held == 7
    assert plan.peak == 7 + 100 + 30  # when backward begins
    assert MemoryPlan(**PARTS, block=50, buffers=15, at_once=False).peak == 7 + 100 + 50
    # Gradients come as activations go; buckets are there as soon as backward begins.
    assert MemoryPlan(**PARTS, block=10, buffers=200, at_once=False).peak == 7 + 200 + 10
    assert MemoryPlan(**PARTS, block=10, buffers=200, at_once=True).peak == 7 + 100 + 10 + 200
    # What is freed and not given back is there as well, and so is all the rest.
    kept = MemoryPlan(**PARTS, block=10, buffers=15, at_once=False, kept=1000)
    assert kept.peak == 7 + 100 + 30 + 15 + 1000


def test_a_teacher_is_there_whole_or_in_shares():
    """And the logits of both models, with a gradient of one's, and a chunk of them in fp32."""
    alone, logits = expect(DDP, workload(dtype="float32")), 32 * CONFIG.vocab_size
    divided = Kind(stage=3, persistence=100, live=50_000, reuse_distance=0)
    for kind, held, in_ram, whole in (
        (DDP, 4 * N, 0, 0),
        (divided, N, 0, 4 * (N // 4 + 4000)),  # a block, more than what may live; and small ones
        (replace(divided, parameters_on="cpu"), 0, N, 4 * (N // 4 + 4000)),
    ):
        plan = expect(DDP, workload(dtype="float32", teacher=Beside(COUNTED, kind)))
        assert (plan.teacher, plan.teacher_in_ram, plan.host) == (held, in_ram, 0)
        assert plan.held == alone.held + held
        assert plan.buffers == alone.buffers + whole
        assert plan.logits == logits * (3 * 4 + 24)
    on_cpu = expect(
        DDP, workload(on_cpu=True, teacher=Beside(COUNTED, replace(divided, parameters_on="cpu")))
    )
    assert (on_cpu.teacher, on_cpu.teacher_in_ram) == (2 * N // 4, 0)


def test_a_cpus_process_keeps_what_came_and_went():
    plans = {name: expect(kind, workload(on_cpu=True)) for name, kind in KINDS.items()}
    kept = {name: plan.kept - FIRST_STEP for name, plan in plans.items()}
    # In 16 bits under ZeRO, fp32 under DDP.
    assert (kept["ddp"], kept["zero1"], kept["zero2"]) == (5 * N, 5 * 2 * N, 5 * 2 * N)
    assert kept["zero3"] == kept["zero3_offload"] == 7.5 * 2 * N
    assert {expect(kind, workload()).kept for kind in ENGINES} == {0}
    assert expect(DDP, workload(processes=1, on_cpu=True)).kept == 0


def test_offload_moves_master_and_moments_into_ram_or_to_nvme():
    values = {"dtype": "bfloat16", "processes": 4}
    on_gpu, offloaded = (expect(KINDS[k], workload(**values)) for k in ("zero2", "zero2_offload"))
    assert (on_gpu.host, on_gpu.optimizer) == (0, 3 * N)
    # 4 + 8 of what is stepped, 4 of its gradients, 2 of what goes back, of a quarter
    assert (offloaded.host, offloaded.optimizer) == ((12 + 4 + 2) * N // 4, 0)
    all_of_it = expect(KINDS["zero3_offload"], workload(**values))
    assert all_of_it.host == (12 + 2 * 4 + 2) * N // 4
    assert all_of_it.parameters < on_gpu.parameters + N
    on_nvme = expect(KINDS["zero_infinity"], workload(**values))
    # State, weights, and the gradients that it is stepped with; their sums stay in RAM, beside the
    # buffers of the file: five of 50 million elements for weights, four for fp32 state.
    assert on_nvme.nvme == (12 + 2 + 4) * N // 4
    assert on_nvme.host == 4 * N // 4 + 5 * 50_000_000 * 2 + 4 * 4 * N // 4
    # On a CPU it would only move from the memory into the memory.
    here = expect(KINDS["zero2_offload"], workload(**values, on_cpu=True))
    assert (here.host, here.optimizer) == (0, offloaded.host)


def test_a_gpu_has_two_whole_buckets_and_a_cpu_what_is_written_into_them():
    on_gpu, on_cpu = (expect(KINDS["zero2"], workload(on_cpu=each)) for each in (False, True))
    assert on_gpu.buffers == 2 * 2 * N + 2 * N  # made no larger than all gradients
    assert on_cpu.buffers == 2 * N + 2 * N
    assert expect(KINDS["zero2"], workload(processes=1)).buffers == 2 * N + 2 * N
    small = Kind("", 2, reduce_bucket=1000)
    assert expect(small, workload()).buffers == 3 * 2 * 1000


def test_a_checkpoint_is_weights_and_moments_whoever_has_them():
    assert {expect(kind, workload()).checkpoint for kind in ENGINES} == {12 * N}


def test_what_is_recomputed_needs_less():
    for kind in ENGINES:
        less = expect(kind, workload(recompute="blocks"))
        assert less.activations < expect(kind, workload()).activations
        assert less.held == expect(kind, workload()).held


def test_what_fits_leaves_room_for_libraries():
    plan = expect(DDP, workload())
    # On a GPU what comes and goes may take a third more.
    assert needs(DDP, workload()) == plan.held + (plan.peak - plan.held) * 4 // 3 + OVERHEAD
    on_cpu = workload(on_cpu=True)
    assert needs(DDP, on_cpu) == expect(DDP, on_cpu).peak + OVERHEAD
    assert fits(DDP, on_cpu, needs(DDP, on_cpu))
    assert not fits(DDP, on_cpu, needs(DDP, on_cpu) - 1)


PLACES = [
    ("zero1", 1, "gpu", "gpu"),
    ("zero2", 2, "gpu", "gpu"),
    ("zero3", 3, "gpu", "gpu"),
    ("zero2_offload", 2, "cpu", "gpu"),
    ("zero3_offload", 3, "cpu", "cpu"),
    ("zero_infinity", 3, "nvme", "nvme"),
]


def test_the_engines_are_those_of_their_files_and_no_others():
    found = [(k.config, k.stage, k.optimizer_on, k.parameters_on) for k in ENGINES]
    assert found == [("ddp", None, "gpu", "gpu"), *PLACES]
    for name, file in FILES.items():
        zero = read_config(file)["zero_optimization"]
        assert KINDS[name].reduce_bucket == zero["reduce_bucket_size"]
        assert KINDS[name].fp32_sums
    for name in ("zero3", "zero3_offload", "zero_infinity"):
        zero = read_config(FILES[name])["zero_optimization"]
        assert KINDS[name].live == zero["stage3_max_live_parameters"]
        assert KINDS[name].reuse_distance == zero["stage3_max_reuse_distance"]
        assert KINDS[name].persistence == 10 * CONFIG.dim  # as "auto" is filled


def test_what_a_file_leaves_out_is_deepspeeds_own_default():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig as Theirs

    offload = {"device": "nvme", "nvme_path": "/nvme"}
    theirs = Theirs(stage=3, offload_param=offload, offload_optimizer=offload)
    ours = kind_of({"zero_optimization": {"stage": 3}})
    assert not ours.fp32_sums
    assert ours.reduce_bucket == theirs.reduce_bucket_size
    assert ours.reuse_distance == theirs.max_reuse_distance
    assert ours.live == theirs.max_live_parameters
    assert ours.persistence == theirs.param_persistence_threshold
    assert ours.sub_group == theirs.sub_group_size
    assert ours.optimizer_buffers == theirs.offload_optimizer.buffer_count
    assert ours.parameter_buffers == theirs.offload_param.buffer_count
    assert ours.parameter_buffer == theirs.offload_param.buffer_size
    assert ours.in_ram == theirs.offload_param.max_in_cpu


def test_an_engine_is_named_by_what_is_where():
    names = [kind.name for kind in ENGINES]
    assert names[:5] == ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-2, optimizer on the CPU"]
    assert names[5:] == ["ZeRO-3, all on the CPU", "ZeRO-3, all on NVMe"]
    mixture = kind_of({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    assert mixture.name == "ZeRO-3, parameters on the CPU"
    assert kind_of(None) == DDP


def test_parameters_may_be_offloaded_without_the_optimizer():
    mixture, work = Kind("", 3, parameters_on="cpu"), workload(dtype="bfloat16")
    plan, whole = expect(mixture, work), 2 * live_parameters(mixture, work)
    assert (plan.parameters, plan.gradients, plan.optimizer) == (whole, N, 3 * N)
    assert plan.host == 2 * N // 4
    assert expect(Kind("", 3), work).parameters == plan.parameters + plan.host
    on_nvme = expect(Kind("", 3, parameters_on="nvme", in_ram=N // 8, parameter_buffer=10), work)
    assert (on_nvme.nvme, on_nvme.host) == (2 * N // 8, 2 * N // 8 + 5 * 10 * 2)


def test_zero_3_lets_go_of_weights_and_a_larger_model_is_divided():
    larger = Parameters(10**9, 10**9, 10**7, {10**7: 100}, flops_per_token=1)
    work = workload(parameters=larger)
    assert live_parameters(KINDS["zero3"], work) == 10**8
    assert live_parameters(Kind("", 3), work) == 10**9  # by DeepSpeed's defaults all of it
    assert expect(KINDS["zero3"], work).held < expect(KINDS["zero2"], work).held
    block = Kind("", 3, live=0, reuse_distance=0, persistence=0)
    assert live_parameters(block, work) == 10**7
    assert live_parameters(Kind("", 3, live=0, reuse_distance=10**8, persistence=0), work) == (
        5 * 10**7
    )


@pytest.mark.parametrize(
    ("stage", "dtype", "gradients", "more"),
    [
        # Kept between micro-batches, and beside buckets: once more its share, where the sum has the
        # model's precision
        (2, "bfloat16", 2 / 4, 2 / 4),
        (2, "float32", 4 / 4, 4 / 4),
        (1, "bfloat16", 2, 2 / 4),
        (1, "float16", 2, 2 / 4),
    ],
)
def test_gradients_may_be_added_up_in_the_precision_of_the_model(stage, dtype, gradients, more):
    kind = Kind("", stage, fp32_sums=False, reduce_bucket=1000)
    plan = expect(kind, workload(dtype=dtype))
    assert plan.gradients == gradients * N
    assert plan.buffers == more * N + 3 * 1000 * (4 if dtype == "float32" else 2)


def test_zero_1_has_a_class_of_its_own_for_bf16_with_fp32_sums_alone():
    plan = expect(KINDS["zero1"], workload(accumulation_steps=1))
    assert (plan.gradients, plan.at_once) == (4 * N, False)
    for kind, dtype in (
        (KINDS["zero1"], "float16"),
        (KINDS["zero1"], "float32"),
        (Kind("", 1, optimizer_on="cpu"), "bfloat16"),
        (Kind("", 1, fp32_sums=False), "bfloat16"),
    ):
        plan = expect(kind, workload(dtype=dtype, accumulation_steps=1))
        assert (plan.gradients, plan.at_once) == (0, True)


CPU = torch.device("cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="what is held is read from /proc")
def test_a_process_on_a_cpu_can_have_its_share_and_what_it_holds(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 2**32)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    before = available_memory(CPU, processes=8) - 2**31
    assert before > 0  # of Python and PyTorch
    # Pages from the system: the allocator may have some that an earlier test has freed.
    with mmap.mmap(-1, 2**27, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held[:: mmap.PAGESIZE] = bytes(len(held) // mmap.PAGESIZE)
        after = available_memory(CPU, processes=8) - 2**31
        assert after - before == pytest.approx(len(held), rel=0.5)
        monkeypatch.delenv("LOCAL_WORLD_SIZE")  # started without a launcher
        assert available_memory(CPU, processes=8) - 2**29 == pytest.approx(after, rel=0.5)


def test_a_process_has_its_gpu_alone(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 2**32)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2**20)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert available_memory(torch.device("cuda", 1), processes=8) == 2**32 + 2**20


def test_where_the_system_does_not_say_nothing_is_known(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: None)
    assert available_memory(CPU, processes=1) is None


@pytest.mark.parametrize(
    ("engine", "dtype", "bytes_per_parameter"),
    [
        ("zero2_offload", "bfloat16", 18 / 2 + 12),  # half of 8 processes are here
        ("zero3_offload", "bfloat16", 22 / 2 + 12),
        ("zero3_offload", "float32", 24 / 2 + 12),
        ("zero_infinity", "bfloat16", (4 + 16) / 2 + 12),  # sums, four buffers of all state
    ],
)
def test_ram_that_will_not_do_is_said_before_anything_is_built(
    monkeypatch, engine, dtype, bytes_per_parameter
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    kind, work = KINDS[engine], workload(dtype=dtype, processes=8)
    buffers = 4 * 5 * 50_000_000 * 2 if engine == "zero_infinity" else 0
    needed = int(N * bytes_per_parameter) + buffers
    for free, warns in ((needed, False), (needed - 1, True), (None, False)):
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        assert (memory.ram_warning(kind, work) is not None) == warns
    monkeypatch.setattr(memory, "free_memory", lambda device: 0)
    assert f"{needed / 2**30:.1f} GiB of RAM" in memory.ram_warning(kind, work)
    assert memory.ram_warning(KINDS["zero3"], work) is None
    assert memory.ram_warning(kind, work.but(on_cpu=True)) is None


@pytest.mark.parametrize(("engine", "of_student"), [("zero2", 0), ("zero2_offload", 18)])
def test_a_teacher_that_lies_in_ram_counts_there(monkeypatch, engine, of_student):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    teacher = Beside(COUNTED, Kind(stage=3, parameters_on="cpu"))
    work = workload(processes=8, teacher=teacher)
    needed = 4 * (2 + of_student) * N // 8 + 12 * N
    for free, warns in ((needed, False), (needed - 1, True)):
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        assert (memory.ram_warning(KINDS[engine], work) is not None) == warns
    assert memory.ram_warning(KINDS[engine], work.but(on_cpu=True)) is None


@pytest.mark.parametrize("kind", ENGINES, ids=lambda kind: kind.config)
def test_beside_others_a_model_keeps_what_never_goes_and_on_a_cpu_all_that_it_had(kind):
    plan = expect(kind, workload())
    assert stays(kind, workload()) == plan.held < plan.peak
    assert stays(kind, workload(on_cpu=True)) == expect(kind, workload(on_cpu=True)).peak
