"""A run known before its launch: what fits, how a global batch is shared, how long a step takes."""

from dataclasses import dataclass
from itertools import product

from training.engine.communication import traffic
from training.engine.kinds import ENGINES, GPU, Kind
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


def largest_batch(kind: Kind, work: Workload, room: int) -> int:
    """Sequences of the largest micro-batch that fits, up to LARGEST_BATCH; 0 if none does."""
    fitting, too_large = 0, LARGEST_BATCH + 1
    while too_large - fitting > 1:
        middle = (fitting + too_large) // 2
        if fits(kind, work.but(batch_size=middle), room):
            fitting = middle
        else:
            too_large = middle
    return fitting


def ram_of_machine(kind: Kind, work: Workload, per_machine: int) -> int:
    """Bytes of RAM on one machine: libraries and what is offloaded, of each of its processes, and a
    checkpoint on its way to the disk."""
    plan = expect(kind, work)
    each = OVERHEAD + (plan.peak if work.on_cpu else plan.host)
    return min(per_machine, work.processes) * each + plan.checkpoint


@dataclass(frozen=True)
class Choice:
    kind: Kind
    work: Workload  # with the micro-batch that fits, perhaps recomputing
    most: int  # sequences of the largest one


def fastest(work: Workload, machine: Machine) -> Choice | None:
    """The first engine that fits: no ZeRO where DDP fits, ZeRO-2 before ZeRO-3, offload last. None
    if nothing does. The room must be known.

    It must take the micro-batch that was asked for, or half of it if none does, and so on: a small
    one costs less than recomputing, and that less than offload.
    """
    sizes = [work.batch_size >> halved for halved in range(work.batch_size.bit_length())]
    recomputing = work.but(recompute=WHOLE_BLOCKS)
    for offloads, each, least in product((False, True), (work, recomputing), sizes):
        for kind in (kind for kind in ENGINES if kind.offloads is offloads):
            if found := _choice(kind, each, least, machine):
                return found
    return None


def _choice(kind: Kind, work: Workload, least: int, machine: Machine) -> Choice | None:
    """This engine, if it takes so many sequences, and the machine's RAM is enough too."""
    most = largest_batch(kind, work, machine.room)
    asked = work.but(batch_size=max(1, min(most, work.batch_size)))
    enough = machine.ram is None or (
        ram_of_machine(kind, asked, machine.per_machine) <= machine.ram
    )
    return Choice(kind, asked, most) if most >= least and enough else None


def shared(work: Workload, sequences: int, processes: int) -> Workload | None:
    """A global batch of so many sequences among so many processes, in micro-batches no larger than
    before; None if it has fewer sequences than there are processes. What cannot be divided is left
    out of it."""
    own = sequences // processes
    if own == 0:
        return None
    size = max(n for n in range(1, min(own, work.batch_size) + 1) if own % n == 0)
    return work.but(processes=processes, batch_size=size, accumulation_steps=own // size)


def step_seconds(kind: Kind, work: Workload, machine: Machine) -> tuple[float, float]:
    """Of computing, and of waiting besides. The machine's `flops` must be known."""
    tokens = work.tokens * work.accumulation_steps
    computing = tokens * work.parameters.flops_per_token / machine.flops
    waiting = traffic(kind, work).waiting(
        seconds=computing,
        micro_batches=work.accumulation_steps,
        bandwidth=machine.bandwidth,
        host_bandwidth=machine.host_bandwidth,
    )
    return computing, waiting


def stops_scaling(kind: Kind, work: Workload, sequences: int, machine: Machine) -> Workload | None:
    """From how many processes on, doubling those there are, a step is more waiting than computing;
    None if that never comes while each process has a sequence."""
    processes = work.processes
    while each := shared(work, sequences, processes):
        computing, waiting = step_seconds(kind, each, machine)
        if waiting > computing:
            return each
        processes *= 2
    return None


def deepspeed_states(kind: Kind, work: Workload, per_machine: int) -> tuple[float, float] | None:
    """DeepSpeed's own estimate of weights, gradients and optimizer, in bytes: of a GPU, and of a
    machine's RAM. None where it has none: it is of ZeRO-2 and 3 in 16 bits.

    The formulas of its `estimate_zero2_model_states_mem_needs` and `estimate_zero3_...`, with
    zero.Init; importing it takes seconds. https://deepspeed.readthedocs.io/en/latest/memory.html
    """
    if kind.stage not in (2, 3):
        return None
    n, largest = work.parameters.total, max(work.parameters.sizes)
    here = min(per_machine, work.processes)
    machines = -(-work.processes // here)
    divided = int(18 * n / (here * machines))
    if kind.stage == 2 and kind.optimizer_on == GPU:
        return 2 * n + divided, 1.5 * 4 * n * here
    if kind.stage == 2:
        return 2 * n, 1.5 * n * max(4 * here * machines, 16)
    if kind.optimizer_on == GPU:
        return 4 * largest + divided, 1.5 * 4 * largest * here
    return 4 * largest, 1.5 * 18 * n / machines
