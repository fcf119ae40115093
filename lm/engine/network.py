"""Estimate what a process sends in an optimizer step, and the time that this takes.

In a ring of P processes each process sends (P - 1) / P of the bytes that are gathered or scattered,
and twice as much in an all-reduce (Patarasuk and Yuan, https://doi.org/10.1016/j.jpdc.2008.09.002).
The ring passes every GPU and every machine, so the slowest link on its way decides: that of a GPU,
or all network cards of a machine together. The estimate ignores latency, waiting for others, AdamW
on the CPU, and NVMe.
docs/engines.md compares it with a simulated network and with published runs.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from lm.common.errors import UsageError
from lm.engine.memory import Workload, can_coalesce
from lm.engine.strategy import GPU, Strategy

# GB/s in one direction, by the data sheet: of a GPU's link to the others of its machine, or of one
# network card. Collective operations are assumed to reach the share REACHED of it.
RATES = {"pcie4": 32, "pcie5": 64, "nvlink3": 300, "nvlink4": 450, "nvlink5": 900}
RATES |= {"ethernet25": 3.125, "ethernet100": 12.5, "infiniband200": 25, "infiniband400": 50}
REACHED = 0.8
BACKWARD = 2 / 3  # share of a micro-batch's time that its backward pass takes
LOSS = 0.1  # share of the time that may be lost by sending, for `most_processes`


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


@dataclass(frozen=True)
class Network:
    """The links between processes, in bytes per second in one direction."""

    per_machine: int  # processes of a machine
    link: float  # from a GPU to the others of its machine
    between: float  # from a machine to the others
    pcie: float = 1e9 * REACHED * RATES["pcie4"]  # from a GPU to RAM

    def rate(self, processes: int) -> float:
        """Return the rate of a ring through so many processes."""
        return min(self.link, self.between) if processes > self.per_machine else self.link


class Traffic(NamedTuple):
    """Bytes of one process in one optimizer step."""

    gradients: float  # sent to other processes
    weights: float  # sent to other processes
    copied: float  # between its GPU and RAM

    @property
    def sent(self) -> float:
        return self.gradients + self.weights


class StepTime(NamedTuple):
    """Seconds of one optimizer step."""

    computing: float
    sending: float  # with copies to and from RAM
    hidden: float  # the part of `sending` that passes while the GPU computes

    @property
    def total(self) -> float:
        return self.computing + self.sending - self.hidden

    @property
    def lost(self) -> float:
        """The share of the time in which the GPU waits."""
        return max(0, 1 - self.computing / self.total)


def traffic(strategy: Strategy, work: Workload) -> Traffic:
    """Return the bytes that a process sends and copies in an optimizer step.

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
        return Traffic(2 * ring * 4 * t, 0, 0)
    if strategy.stage < 3:
        every = micro_batches if strategy.stage == 2 and not strategy.coalesces else 1
        copied = (4 + h) * t * share * offloads
        return Traffic(2 * ring * h * t * every, ring * h * t, copied)
    gathered = h * micro_batches * (2 * n - min(n, strategy.reuse_distance // 2))
    scattered = h * micro_batches * t
    copied = 8 * t * micro_batches * share * offloads
    copied += gathered * share * (strategy.parameters_on != GPU and not work.on_cpu)
    scattered *= 2 if work.on_cpu else 1  # instead of a reduce-scatter, gloo runs an all-reduce
    return Traffic(ring * scattered, ring * gathered, copied)


def step_time(strategy: Strategy, work: Workload, computing: float, network: Network) -> StepTime:
    """Return the time of a step that computes for `computing` seconds.

    The hidden part is an assumption. DDP exchanges gradients during the last backward pass, ZeRO-2
    without `coalesces` during each backward pass, and ZeRO-3 sends during forward and backward. The
    other exchanges, and copies to RAM, follow the backward passes."""
    sent, rate = traffic(strategy, work), network.rate(work.processes)
    gradients, weights = sent.gradients / rate, sent.weights / rate
    if strategy.stage == 3:
        hidden = min(gradients + weights, computing)
    elif strategy.stage is None:
        hidden = min(gradients, BACKWARD * computing / work.args.accumulation_steps)
    else:
        overlaps = strategy.stage == 2 and not strategy.coalesces
        hidden = min(gradients, BACKWARD * computing) * overlaps
    return StepTime(computing, gradients + weights + sent.copied / network.pcie, hidden)


def shared_by(
    processes: int,
    strategy: Strategy,
    work: Workload,
    computing: float,
    network: Network,
    memory: int,
) -> StepTime:
    """Return the time of a step if `processes` processes, each with `memory` bytes, share the
    global batch of `work`, for which each process of `work` computes `computing` seconds."""
    rows = math.ceil(work.args.global_batch(work.processes) / processes)  # sequences of a process
    steps = math.ceil(rows / work.args.batch_size)
    args = replace(work.args, batch_size=math.ceil(rows / steps), accumulation_steps=steps)
    each = replace(work, args=args, processes=processes)
    strategy = replace(strategy, coalesces=can_coalesce(strategy, each, memory))
    return step_time(strategy, each, computing * work.processes / processes, network)


def most_processes(
    strategy: Strategy, work: Workload, computing: float, network: Network, memory: int
) -> int:
    """Return the largest power of two of processes that lose less than LOSS of their time when
    they share the global batch, or 0. The arguments are those of `shared_by`."""
    counts = [2**i for i in range(work.args.global_batch(work.processes).bit_length())]
    times = {n: shared_by(n, strategy, work, computing, network, memory) for n in counts}
    return max((n for n, time in times.items() if time.lost < LOSS), default=0)
