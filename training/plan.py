"""A run known before its launch: what fits, how a global batch is shared, how long a step takes."""

from dataclasses import dataclass
from itertools import product

from training.engine.advice import choices
from training.engine.communication import traffic
from training.engine.kinds import GPU, NVME, Kind
from training.engine.memory import OVERHEAD, expect, fits
from training.engine.workload import Workload

WHOLE_BLOCKS = "blocks"  # of --gradient_checkpointing
LARGEST_BATCH = 4096  # sequences of a micro-batch that are tried


@dataclass(frozen=True)
class Machine:
    """What a process has."""

    room: int | None  # bytes of its GPU, or of RAM where it trains on a CPU; None if unknown
    ram: int | None  # bytes of one machine, for all its processes; None if unknown
    per_machine: int  # processes, at most
    bandwidth: float  # bytes per second that a process can send
    host_bandwidth: float  # bytes per second between a GPU and RAM or NVMe
    flops: float | None  # that a process reaches per second, peak × MFU; None if unknown


def ram_of_machine(kind: Kind, work: Workload, per_machine: int) -> int:
    """Bytes of RAM on one machine: libraries and what is offloaded, of each of its processes, and a
    checkpoint on its way to the disk."""
    plan = expect(kind, work)
    each = OVERHEAD + (plan.peak if work.on_cpu else plan.host)
    return min(per_machine, work.processes) * each + plan.checkpoint


def enough(kind: Kind, work: Workload, machine: Machine) -> bool:
    """Whether a GPU's memory and the machine's RAM suffice, as far as they are known."""
    in_ram = machine.ram is None or ram_of_machine(kind, work, machine.per_machine) <= machine.ram
    return in_ram and (machine.room is None or fits(kind, work, machine.room))


def largest_batch(kind: Kind, work: Workload, machine: Machine) -> int:
    """Sequences of the largest micro-batch that fits, up to LARGEST_BATCH; 0 if none does."""
    fitting, too_large = 0, LARGEST_BATCH + 1
    while too_large - fitting > 1:
        middle = (fitting + too_large) // 2
        if enough(kind, work.but(batch_size=middle), machine):
            fitting = middle
        else:
            too_large = middle
    return fitting


@dataclass(frozen=True)
class Choice:
    kind: Kind
    work: Workload  # perhaps recomputing
    most: int  # sequences of the largest micro-batch


def fastest(work: Workload, machine: Machine) -> Choice | None:
    """The first engine that fits: no ZeRO where DDP fits, ZeRO-2 before ZeRO-3, offload last. None
    if nothing does. The room must be known.

    It must take the micro-batch that was asked for, or half of it if none does, and so on: a small
    one costs less than recomputing, and that less than offload.
    """
    sizes = [work.batch_size >> halved for halved in range(work.batch_size.bit_length())]
    recomputing = work.but(recompute=WHOLE_BLOCKS)
    for offloads, each, least in product((False, True), (work, recomputing), sizes):
        for kind in (kind for kind in choices(work) if kind.offloads is offloads):
            most = largest_batch(kind, each, machine)
            if most >= least:
                return Choice(kind, each, most)
    return None


def shared(work: Workload, sequences: int, processes: int) -> Workload | None:
    """A global batch of so many sequences among so many processes, in micro-batches no larger than
    before; None if it has fewer sequences than there are processes. What cannot be divided is left
    out of it."""
    own = sequences // processes
    if own == 0:
        return None
    steps = next(n for n in range(-(-own // work.batch_size), own + 1) if own % n == 0)
    return work.but(processes=processes, batch_size=own // steps, accumulation_steps=steps)


def recomputed(work: Workload) -> int:
    """FLOPs per token of what --gradient_checkpointing computes again, forward: the blocks, or all
    but attention where its kernel's output is kept."""
    config = work.config
    if work.recompute == "off":
        return 0
    attention = 4 * config.n_heads * config.head_dim * config.max_seq_len
    kept = work.recompute == "selective" and not work.plain
    return config.n_layers * (2 * work.parameters.block + (0 if kept else attention))


def step_seconds(kind: Kind, work: Workload, machine: Machine) -> tuple[float, float]:
    """Of computing, and of waiting besides. The machine's `flops` must be known."""
    tokens = work.tokens * work.accumulation_steps
    computing = tokens * (work.parameters.flops_per_token + recomputed(work)) / machine.flops
    waiting = traffic(kind, work).waiting(
        seconds=computing,
        micro_batches=work.accumulation_steps,
        bandwidth=machine.bandwidth,
        host_bandwidth=machine.host_bandwidth,
    )
    return computing, waiting


def deepspeed_states(kind: Kind, work: Workload, per_machine: int) -> tuple[int, int] | None:
    """DeepSpeed's own estimate of weights, gradients and optimizer, in bytes: of a GPU, and of a
    machine's RAM. None where it has none: it is of ZeRO-2 and 3 in 16 bits, without NVMe.
    https://deepspeed.readthedocs.io/en/latest/memory.html"""
    if (
        kind.stage not in (2, 3)
        or work.half == 4
        or NVME in (kind.optimizer_on, kind.parameters_on)
    ):
        return None
    # Seconds to import.
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    n, here = work.parameters.total, min(per_machine, work.processes)
    layout = {"num_gpus_per_node": here, "num_nodes": -(-work.processes // here)}
    layout["cpu_offload"] = kind.optimizer_on != GPU
    if kind.stage == 2:
        ram, gpu = estimate_zero2_model_states_mem_needs(n, **layout)
    else:
        layout["cpu_offload_params"] = kind.parameters_on != GPU
        largest = max(work.parameters.sizes)
        ram, gpu, _ = estimate_zero3_model_states_mem_needs(n, largest, **layout)
    return gpu, ram
