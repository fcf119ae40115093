"""Plan a run for machines that need not be here: the engine to take, and the GPUs it uses well."""

import math
from dataclasses import dataclass, replace

from lm.engine.memory import Workload, can_coalesce, fits
from lm.engine.network import Network, StepTime, step_time
from lm.engine.strategy import Strategy, strategies

LOSS = 0.1  # share of the time that may be lost by sending, for `most_processes`


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run, and what its machines can do."""

    work: Workload
    network: Network
    computing: float  # seconds that a process of `work` computes in a step; 0 if unknown
    memory: int  # bytes that a process may use on its GPU, or in RAM without GPUs
    ram: float = math.inf  # bytes that a process may offload to RAM

    def engines(self) -> list[Strategy]:
        """Return the engines that support the optimizer."""
        muon = self.work.args.optimizer == "muon"
        return [each for each in strategies() if each.takes_muon or not muon]

    def first_that_fits(self) -> Strategy | None:
        """Return the engine to take, or None."""
        found = (each for each in self.engines() if fits(each, self.work, self.memory, self.ram))
        return next(found, None)

    def shared_by(self, processes: int, engine: Strategy) -> StepTime:
        """Return the time of a step if so many processes share the global batch."""
        args = self.work.args
        rows = math.ceil(args.global_batch(self.work.processes) / processes)  # of a process
        steps = math.ceil(rows / args.batch_size)
        args = replace(args, batch_size=math.ceil(rows / steps), accumulation_steps=steps)
        plan = replace(self, work=replace(self.work, args=args, processes=processes))
        computing = self.computing * self.work.processes / processes
        return step_time(plan.as_trained(engine), plan.work, computing, self.network)

    def most_processes(self, engine: Strategy) -> int:
        """Return the largest power of two of processes that lose less than LOSS of their time when
        they share the global batch, or 0."""
        most = self.work.args.global_batch(self.work.processes)
        counts = [2**i for i in range(most.bit_length())]
        return max((n for n in counts if self.shared_by(n, engine).lost < LOSS), default=0)

    def as_trained(self, engine: Strategy) -> Strategy:
        """Return the engine, with `coalesces` as a run would choose it."""
        return replace(engine, coalesces=can_coalesce(engine, self.work, self.memory))
