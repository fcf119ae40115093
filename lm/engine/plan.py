"""Plan a run for GPUs that need not be here: bytes sent, time of a step, GPUs that it uses well.

In a ring of P processes each process sends (P - 1) / P of the bytes that are gathered or scattered,
and twice as much in an all-reduce (Patarasuk and Yuan, https://doi.org/10.1016/j.jpdc.2008.09.002).
The ring passes every GPU and every machine, so the slowest link on its way decides: that of a GPU,
or all network cards of a machine together. The estimate ignores latency, waiting for others, AdamW
on the CPU, and NVMe.
docs/engines.md compares it with a simulated network and with published runs.
"""

import math
from argparse import Namespace
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from lm.common.errors import UsageError
from lm.engine.compilation import should_compile
from lm.engine.hardware import GIB, available_memory, peak_flops
from lm.engine.memory import Workload, can_coalesce
from lm.engine.strategy import GPU, Strategy, strategies
from model import Transformer

# GB/s in one direction, by the data sheet: of a GPU's link to the others of its machine, or of one
# network card. Collective operations are assumed to reach the share REACHED of it.
RATES = {"pcie4": 32, "pcie5": 64, "nvlink3": 300, "nvlink4": 450, "nvlink5": 900}
RATES |= {"ethernet25": 3.125, "ethernet100": 12.5, "infiniband200": 25, "infiniband400": 50}
REACHED = 0.8
GPUS = 8  # assumed GPUs of a machine
TOKENS_PER_PARAMETER = 20  # compute-optimal: https://arxiv.org/abs/2203.15556
LOSS = 0.1  # share of the time that may be lost by sending, for `most_processes`
BACKWARD = 2 / 3  # share of a micro-batch's time that its backward pass takes
# Words of a GPU's name → its links to the others of its machine, and to RAM.
LINKS = {
    "A100": ("nvlink3", "pcie4"),
    "A800": ("160", "pcie4"),
    "H800": ("160", "pcie5"),
    "H100 H200 GH200": ("nvlink4", "pcie5"),
    "B200 GB200": ("nvlink5", "pcie5"),
}


def bytes_per_second(text: str) -> float:
    """Return the rate of a link that a flag names: NAME of RATES, NxNAME for N of them, or a
    number of GB/s that the link reaches. Raises UsageError for other text."""
    count, cross, name = text.rpartition("x")
    try:
        named = name in RATES and (not cross or count.isdecimal())
        rate = REACHED * RATES[name] * int(count or 1) if named else float(text)
    except ValueError:
        rate = 0
    if not rate > 0:
        raise UsageError(f"{text!r} is no link: pass GB/s, NAME or NxNAME of {', '.join(RATES)}")
    return 1e9 * rate


def links_of(gpu: str) -> tuple[str, str]:
    """Return the links of a GPU with this name: to the others of its machine, and to RAM."""
    words = {*gpu.upper().replace("-", " ").split()}
    found = (links for names, links in LINKS.items() if words & {*names.split()})
    link, pcie = next(found, ("pcie4", "pcie4"))
    return (pcie if "PCIE" in words else link), pcie


class Network(NamedTuple):
    """The links between processes, in bytes per second in one direction."""

    per_machine: int  # processes of a machine
    link: float  # from a GPU to the others of its machine
    between: float  # from a machine to the others
    pcie: float = 1e9 * REACHED * RATES["pcie4"]  # from a GPU to RAM


class StepTime(NamedTuple):
    """The time of one optimizer step, and what a process sends in it."""

    seconds: float
    lost: float  # share of the seconds in which the GPU waits
    sent: float  # bytes to other processes


def traffic(strategy: Strategy, work: Workload) -> tuple[float, float, float]:
    """Return the bytes that a process sends in an optimizer step for gradients and for weights, and
    the bytes that it copies between its GPU and RAM.

    DDP, ZeRO-1 and 2 all-reduce gradients, ZeRO-3 scatters them. ZeRO-3, and ZeRO-2 without
    `coalesces`, do so in each micro-batch, the others once per step. ZeRO-1 and 2 gather weights
    once per step, ZeRO-3 in each forward and backward. With offload, ZeRO-1 and 2 copy a process's
    share of the gradients to RAM and of the weights back. ZeRO-3 copies gradients there and back in
    each micro-batch, and its share of the weights whenever it gathers them.
    """
    n, t, h = work.shapes.num_parameters(), work.trained, work.itemsize
    ring, share = (work.processes - 1) / work.processes, 1 / work.processes
    micro_batches = work.args.accumulation_steps
    offloads = strategy.optimizer_on != GPU and not work.on_cpu
    if strategy.stage is None:
        return 2 * ring * 4 * t, 0, 0
    if strategy.stage < 3:
        every = micro_batches if strategy.stage == 2 and not strategy.coalesces else 1
        return 2 * ring * h * t * every, ring * h * t, (4 + h) * t * share * offloads
    gathered = h * micro_batches * (2 * n - min(n, strategy.reuse_distance // 2))
    scattered = h * micro_batches * t
    copied = 8 * t * micro_batches * share * offloads
    copied += gathered * share * (strategy.parameters_on != GPU and not work.on_cpu)
    scattered *= 2 if work.on_cpu else 1  # instead of a reduce-scatter, gloo runs an all-reduce
    return ring * scattered, ring * gathered, copied


def step_time(strategy: Strategy, work: Workload, computing: float, network: Network) -> StepTime:
    """Return the time of a step that computes for `computing` seconds.

    The part of the sending that passes during computing is assumed. DDP exchanges gradients during
    the last backward pass, ZeRO-2 without `coalesces` during each backward pass, and ZeRO-3 sends
    during forward and backward. Other exchanges, and copies to RAM, follow the backward passes."""
    gradients, weights, copied = traffic(strategy, work)
    within = work.processes <= network.per_machine
    rate = network.link if within else min(network.link, network.between)
    sent = gradients + weights
    # Share of the computing that passes while the engine sends.
    last_backward = BACKWARD / work.args.accumulation_steps
    shares = {None: last_backward, 2: 0 if strategy.coalesces else BACKWARD, 3: 1}
    hidden = (sent if strategy.stage == 3 else gradients) / rate
    hidden = min(hidden, shares.get(strategy.stage, 0) * computing)
    waiting = sent / rate + copied / network.pcie - hidden
    return StepTime(computing + waiting, waiting / max(computing + waiting, 1e-9), sent)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run, and what its machines can do."""

    work: Workload
    network: Network
    computing: float  # seconds that a process of `work` computes in a step; 0 if unknown
    memory: int  # bytes that a process may use on its GPU, or in RAM without GPUs
    ram: float = math.inf  # bytes that a process may offload to RAM
    steps: float = 1  # of the whole run
    gpu: str = ""  # name of the GPU, or "this device"
    links: tuple[str, ...] = ()  # names or GB/s of the links of `network`

    @property
    def engines(self) -> list[Strategy]:
        """The engines that support the optimizer, in the order in which to try them."""
        muon = self.work.args.optimizer == "muon"
        return [each for each in strategies() if each.takes_muon or not muon]

    def shared_by(self, processes: int, strategy: Strategy) -> StepTime:
        """Return the time of a step if so many processes share the global batch."""
        args = self.work.args
        rows = math.ceil(args.global_batch(self.work.processes) / processes)  # of a process
        steps = math.ceil(rows / args.batch_size)
        args = replace(args, batch_size=math.ceil(rows / steps), accumulation_steps=steps)
        plan = replace(self, work=replace(self.work, args=args, processes=processes))
        computing = self.computing * self.work.processes / processes
        return step_time(plan.as_trained(strategy), plan.work, computing, self.network)

    def most_processes(self, strategy: Strategy) -> int:
        """Return the largest power of two of processes that lose less than LOSS of their time when
        they share the global batch, or 0."""
        most = self.work.args.global_batch(self.work.processes)
        counts = [2**i for i in range(most.bit_length())]
        return max((n for n in counts if self.shared_by(n, strategy).lost < LOSS), default=0)

    def as_trained(self, strategy: Strategy) -> Strategy:
        """Return the engine, with `coalesces` as a run would choose it."""
        return replace(strategy, coalesces=can_coalesce(strategy, self.work, self.memory))


def plan_of(args, shapes: Transformer, flags: Namespace) -> Plan:
    """Return the plan for the flags of scripts.plan. `args` are the training flags, `shapes` is the
    model on the meta device. Raises UsageError if a flag has no meaning here."""
    n, has_gpu = flags.num_processes, torch.cuda.is_available()
    if flags.num_machines and n % flags.num_machines:
        raise UsageError(f"--num_machines {flags.num_machines} does not divide --num_processes {n}")
    if not all(x is None or x > 0 for x in (flags.gpu_memory, flags.ram, flags.mfu, flags.tokens)):
        raise UsageError("--gpu_memory, --ram, --mfu and --tokens must be above 0")
    if flags.device and not flags.gpu_memory and not has_gpu:
        raise UsageError(f"--device {flags.device}: also pass --gpu_memory, in GiB")
    per_machine = n // flags.num_machines if flags.num_machines else GPUS
    ram = flags.ram * GIB / n if flags.ram else math.inf  # of a process; unknown if not here
    if not (flags.ram or flags.gpu_memory):
        ram = available_memory(torch.device("cpu"), min(n, per_machine))
    device = torch.device("cuda" if flags.gpu_memory or has_gpu else "cpu")
    gpu = flags.device or (torch.cuda.get_device_name() if has_gpu else "this device")
    link, pcie = links_of(gpu)
    links = (flags.link or link, flags.network, pcie)
    step = args.global_batch(n) * shapes.config.max_seq_len  # tokens
    suitable = TOKENS_PER_PARAMETER * shapes.num_parameters(active=True)
    steps = (flags.tokens or (args.max_steps or 0) * step or suitable) / step
    flops = step * shapes.flops_per_token(shapes.config.max_seq_len) / n  # of a process in a step
    compiled = should_compile(args.compile, steps * flops, device)
    peak = peak_flops(gpu, args.matrix_precision)
    return Plan(
        work=Workload(args=args, shapes=shapes, processes=n, device=device, compiled=compiled),
        network=Network(per_machine, *map(bytes_per_second, links)),
        computing=flops / (peak * flags.mfu) if peak else 0,
        memory=int((flags.gpu_memory or 0) * GIB) or available_memory(device, min(n, per_machine)),
        ram=ram,
        steps=steps,
        gpu=gpu,
        links=links,
    )
