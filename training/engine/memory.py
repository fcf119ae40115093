"""How much memory a process will need, part by part, before it runs out; and how much there is."""

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from training.engine.activations import activations
from training.engine.kinds import CPU, GPU, NVME, Kind
from training.engine.workload import Workload

GIB = 2**30
# What a process needs besides: Python and PyTorch; on a GPU workspaces, and blocks cut up.
OVERHEAD = GIB
ZERO_1_BUCKET = 500_000_000  # elements that DeepSpeed exchanges at once in 16 bits
# What the first step of several processes takes on a CPU whatever the model: threads of backward
# and of the exchange, compiled kernels. Measured (20 to 38 MB, under every engine), not derived.
FIRST_STEP = 30_000_000


@dataclass(frozen=True)
class MemoryPlan:
    """What one process is expected to hold, in bytes, where it trains: on a GPU, or on a CPU where
    there is none. `host`, `teacher_in_ram` and `nvme` are elsewhere."""

    parameters: int  # as forward uses them
    gradients: int  # from the first micro-batch of a step to the end of the step
    optimizer: int  # fp32 weights that are stepped, and moments
    activations: int  # from forward to backward
    logits: int  # with their gradient, when backward begins
    block: int  # of the block that is at its backward
    buffers: int  # gradients on their way: buckets to exchange them in, and copies
    at_once: bool  # buffers are there as soon as backward begins, or they fill with gradients
    teacher: int = 0  # weights of another model that is asked
    teacher_in_ram: int = 0  # where it keeps them there
    kept: int = 0  # on a CPU, freed and not given back: training/engine/cpu_settings.py
    host: int = 0  # RAM, of a process whose optimizer or parameters are there
    checkpoint: int = 0  # RAM of the main process while it writes one: weights and moments
    nvme: int = 0

    @property
    def held(self) -> int:
        """What never goes."""
        return self.parameters + self.gradients + self.optimizer + self.teacher

    @property
    def peak(self) -> int:
        """The most at one time. On a GPU less than the sum of the parts: the logits are gone when
        the first block is at its backward, activations go as gradients come. Where freed memory is
        kept, in pieces that the next large tensor does not fit into, nothing ever goes."""
        if self.kept:
            working = max(self.logits, self.block)
            return self.held + self.activations + working + self.buffers + self.kept
        if self.at_once:
            return self.held + self.activations + max(self.logits, self.block + self.buffers)
        working = max(self.logits, self.block)
        return self.held + max(self.activations + working, self.buffers + self.block)


def expect(kind: Kind, work: Workload) -> MemoryPlan:
    """The memory of one process under an engine.

    Without DeepSpeed all state is fp32: 4 + 4 + 8 bytes per parameter; under DDP gradients live in
    its buckets. DeepSpeed in 16 bits has weights of 2 bytes, and fp32 weights to step and moments
    of 4 + 8, which ZeRO-1 divides among the processes; ZeRO-2 divides the sum of the gradients too
    (4, where it is in fp32), ZeRO-3 the weights as well (Rajbhandari et al.,
    https://arxiv.org/abs/1910.02054). Of what is frozen there are the weights alone, in the
    precision of forward and backward, and so of a teacher, or its share. What passes through
    besides is read in DeepSpeed 0.19 (runtime/zero/stage_1_and_2.py, stage3.py,
    runtime/bf16_optimizer.py), and measured by benchmarks/engines.py.
    """
    t, h = work.parameters.trained, work.half
    moments = 8 * t - 4 * work.parameters.by_muon
    accumulates = work.accumulation_steps > 1
    if kind.stage is None:
        buckets = 0 if work.processes == 1 else 4 * t
        sums = 4 * t if accumulates else 0  # no buckets until the last micro-batch
        parts = {
            "parameters": 4 * t + h * work.parameters.frozen,
            "gradients": buckets + sums,
            "optimizer": moments,
            "buffers": 0 if buckets or sums else 4 * t,
        }
    elif kind.stage < 3:
        parts = _zero_1_2(kind, work, moments)
    else:
        parts = _zero_3(kind, work, moments)
    if work.teacher:
        place, held, whole = _teacher(work)
        parts[place] = held
        parts["buffers"] += whole
    if kind.stage == 3:  # which --compile auto leaves alone
        work = work.but(compiled=False)
    held = activations(work, autocast=kind.stage is None and h == 2)
    host, nvme = parts.pop("host", 0), parts.pop("nvme", 0)
    if work.on_cpu:  # to a CPU's own memory nothing can be moved out of it
        parts["optimizer"] += host
        host = 0
    return MemoryPlan(
        **{name: int(size) for name, size in parts.items()},
        activations=held.kept,
        logits=held.logits,
        block=held.block,
        at_once=not (work.on_cpu or kind.stage is None or is_bf16_optimizer(kind, work)),
        host=int(host),
        checkpoint=4 * t + moments,
        kept=int(_kept(kind, work)),
        nvme=int(nvme),
    )


def _kept(kind: Kind, work: Workload) -> float:
    """What a CPU's process keeps of tensors as large as the model that came and went: the weights
    before they were flattened, copies of buckets, what was gathered; and what any first step takes.
    Measured and not derived, by benchmarks/engines.py with 7 and 26 million parameters and 2
    processes: what was missing then lay within a third of this."""
    if not work.on_cpu or (work.processes == 1 and kind.stage is None):
        return 0
    trained, whole = work.parameters.trained, work.half * work.parameters.total
    stepped = work.half * trained
    copies = {None: 5 * trained, 1: 5 * stepped, 2: 5 * stepped, 3: 7.5 * whole}
    return copies[kind.stage] + FIRST_STEP


def needs(kind: Kind, work: Workload) -> int:
    """Bytes that a process must be able to have, libraries included. What comes and goes on a GPU
    is not measured yet: a third more of it."""
    plan = expect(kind, work)
    passing = plan.peak - plan.held
    return plan.held + (passing if work.on_cpu else passing * 4 // 3) + OVERHEAD


def stays(kind: Kind, work: Workload) -> int:
    """Bytes that a model keeps from the others of its process when these are at work. On a CPU also
    what it has freed: the allocator keeps it, and in pieces that may suit nobody else."""
    plan = expect(kind, work)
    return plan.peak if work.on_cpu else plan.held


def fits(kind: Kind, work: Workload, room: int) -> bool:
    """Whether a process that can have so many bytes has enough."""
    return needs(kind, work) <= room


def is_bf16_optimizer(kind: Kind, work: Workload) -> bool:
    """Whether DeepSpeed takes its class of that name: whole fp32 gradients on each process, and
    nothing sent before backward ends (runtime/engine.py)."""
    own = kind.stage == 1 and kind.fp32_sums and kind.optimizer_on == GPU
    return own and work.dtype == "bfloat16"


def sum_bytes(kind: Kind, work: Workload) -> int:
    """Of an element of the gradients that are added up."""
    return 4 if kind.fp32_sums else work.half


def _zero_1_2(kind: Kind, work: Workload, moments: int) -> dict[str, float]:
    """Parts under ZeRO-1 and 2; "host" is what the optimizer has where it is on the CPU."""
    t, h, processes = work.parameters.trained, work.half, work.processes
    optimizer, sums = (4 * t + moments) / processes, sum_bytes(kind, work)
    apart = is_bf16_optimizer(kind, work)
    if apart:
        gradients, own, bucket, copy = 4 * t, 2 * t, 0, 6 * min(t, ZERO_1_BUCKET)
    else:
        gradients, own = sums * t / (processes if kind.stage == 2 else 1), 0
        if kind.stage == 1 or sums == h:
            own = sums * t / processes  # its share of the gradients, once more
        bucket, copy = _bucket(kind, work), h * min(t, kind.reduce_bucket)  # that is exchanged
    # Kept from one micro-batch to the next; the class for bf16 has a tensor of its own for them.
    held = gradients if work.accumulation_steps > 1 or apart else 0
    parts = {
        "parameters": h * work.parameters.total,
        "gradients": held,
        "optimizer": optimizer,
        "buffers": bucket + copy + own + gradients - held,
    }
    if kind.optimizer_on != GPU:  # and there the gradients that it steps with, and what it sends
        return parts | {"optimizer": 0, "host": optimizer + (4 + h) * t / processes}
    return parts


def _zero_3(kind: Kind, work: Workload, moments: int) -> dict[str, float]:
    """Parts under ZeRO-3; on NVMe, "host" has the buffers through which it comes and goes, and the
    sums of the gradients."""
    t, h, processes = work.parameters.trained, work.half, work.processes
    own, sums = work.parameters.total / processes, sum_bytes(kind, work) * t / processes
    optimizer = (moments + (4 * t if h == 2 or kind.offloads else 0)) / processes
    parts = {
        "parameters": h * live_parameters(kind, work),
        "gradients": 0,
        "optimizer": 0,
        "buffers": _bucket(kind, work) + h * min(t, kind.reduce_bucket),
        "host": 0,
        "nvme": 0,
    }
    if kind.parameters_on == NVME:
        in_ram = min(own, kind.in_ram)
        parts["nvme"] += h * (own - in_ram)
        parts["host"] += h * (in_ram + kind.parameter_buffers * kind.parameter_buffer)
    else:
        parts["parameters" if kind.parameters_on == GPU else "host"] += h * own
    if kind.optimizer_on == GPU:
        return parts | {"gradients": sums, "optimizer": optimizer}
    stepped = 4 * t / processes  # gradients, as the optimizer takes them
    parts["host" if kind.optimizer_on == CPU else "nvme"] += optimizer + stepped
    if kind.optimizer_on == NVME:
        parts["host"] += 4 * kind.optimizer_buffers * min(t / processes, kind.sub_group)
    parts["host"] += sums
    return parts


def _teacher(work: Workload) -> tuple[str, int, int]:
    """Where a process holds how much of a teacher, and what it has whole at a time besides."""
    (parameters, kind), h = work.teacher, work.half
    if kind.stage is None:
        return "teacher", h * parameters.total, 0
    in_ram = kind.parameters_on != GPU and not work.on_cpu
    place = "teacher_in_ram" if in_ram else "teacher"
    share = h * parameters.total // work.processes
    return place, share, h * live_parameters(kind, work.but(parameters=parameters))


def _bucket(kind: Kind, work: Workload) -> int:
    """Bytes of the buckets in which gradients are exchanged, which are made no larger than all of
    these: two, where one can fill while the other is on its way. A GPU has them whole, a CPU what
    has been written to."""
    both = kind.stage < 3 and work.processes > 1 and not work.on_cpu
    return work.half * min(work.parameters.trained, kind.reduce_bucket) * (2 if both else 1)


def persistent_parameters(kind: Kind, work: Workload) -> int:
    """Elements in tensors so small that ZeRO-3 leaves them on every process."""
    return work.parameters.up_to(kind.persistence)


def live_parameters(kind: Kind, work: Workload) -> int:
    """Elements that ZeRO-3 has whole at a time, at most: small tensors, those that it fetches ahead
    or does not let go of, for they come again within the reuse distance, there and back; and a
    block at least."""
    n, small = work.parameters.total, persistent_parameters(kind, work)
    return small + min(n - small, max(kind.live, kind.reuse_distance // 2, work.parameters.block))


def ram_warning(kind: Kind, work: Workload) -> str | None:
    """What to say before an engine is built that offloads more than there is: a process that the
    system kills for memory says nothing. None if there is room, nobody knows, or nothing is
    offloaded, as on a CPU."""
    plan = expect(kind, work)
    offloaded = plan.host + plan.teacher_in_ram
    here = int(os.environ.get("LOCAL_WORLD_SIZE", work.processes))
    needed = here * offloaded + plan.checkpoint
    free = free_memory(torch.device("cpu"))
    if not offloaded or free is None or needed <= free:
        return None
    return (
        f"WARNING: what is offloaded is expected to need {needed / GIB:.1f} GiB of RAM, and "
        f"{free / GIB:.1f} are free: the system may end a process without a word; more machines, "
        "NVMe or a smaller model need less"
    )


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be taken: of the GPU, or of RAM within a container's limit.

    None where the system does not say.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    fields = dict(line.split(":") for line in meminfo.read_text(encoding="ascii").splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.stat")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        stat = dict(line.split() for line in used.read_text().splitlines())
        free = min(free, int(text) - int(stat["anon"]))  # the rest can be reclaimed
    return free


def available_memory(device: torch.device, processes: int) -> int | None:
    """Bytes that this process can have in all: what it holds already, and its share of what is
    free, for on a CPU the processes of a machine share one memory.

    None where the system does not say.
    """
    free = free_memory(device)
    if free is None or device.type == "cuda":
        return free if free is None else free + torch.cuda.memory_reserved(device)
    resident, shared = map(int, Path("/proc/self/statm").read_text(encoding="ascii").split()[1:3])
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return free // sharing + (resident - shared) * resource.getpagesize()
