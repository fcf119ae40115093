"""How fast a candidate model trains: measured on this machine, or assumed."""

import time
from dataclasses import replace
from typing import Any

import torch

from lm.common.numbers import available_cores
from lm.engine.hardware import available_memory, peak_flops, user_sets_threads
from lm.engine.memory import largest_batch
from lm.engine.strategy import Strategy
from lm.launch.recipe import Candidate, Speed
from lm.launch.shell_variables import ShellVariables
from lm.training.inputs import Inputs
from lm.training.measurement import measure
from model import Transformer

# Assumed FLOP/s of a CPU core, peak FLOP/s of an unknown GPU, share of the peak that a GPU reaches.
CORE_FLOPS, GPU_PEAK, GPU_SHARE = 5e10, 1e14, 0.3
FORWARD_SHARE = 1 / 3  # of the time of a training step; assumed for validation


def assumed_flops(precision: str, machines: int, processes: int) -> float:
    """Return the FLOP/s that a process is assumed to reach in training."""
    if torch.cuda.is_available():
        return (peak_flops(torch.cuda.get_device_name(), precision) or GPU_PEAK) * GPU_SHARE
    return CORE_FLOPS * available_cores() * machines / processes


class SpeedMeter:
    """Measure or assume the speed and the memory of models, in a run with `processes` processes
    with this `strategy`. Measuring ends when `seconds` are over. `has_threads` says that
    a flag decides the number of CPU threads."""

    def __init__(
        self,
        request: ShellVariables,
        inputs: Inputs,
        strategy: Strategy,
        processes: int,
        seconds: float,
        has_threads: bool,
    ):
        self.request, self.inputs = request, inputs
        self.strategy, self.processes = strategy, processes
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.seconds, self.until = seconds, time.time() + seconds
        # The numbers of threads of a process to choose from; (): there is no choice.
        self.thread_counts = ()
        if self.device.type == "cpu" and not (has_threads or user_sets_threads()):
            cores = max(1, available_cores() // processes)
            counts = (cores, max(1, cores - 1), max(1, cores // 2))
            self.thread_counts = tuple(dict.fromkeys(counts))
        self.last = 0.0  # seconds of the last measurement
        self.slowness = 1.0  # measured time of the last model, divided by its assumed time
        self.sample_share = FORWARD_SHARE  # of the time of a training step
        self.threads: int | None = None  # the fastest number for the last model; None: not measured
        self._known: dict[tuple[str, int], tuple[Speed, int | None]] = {}  # by name and rows

    def free_memory(self) -> int:
        """Return the bytes that a process can use: of the GPU with the least, or of RAM."""
        if self.device.type == "cpu":
            return available_memory(self.device, self.processes)
        gpus = range(min(self.processes, torch.cuda.device_count()))
        return min(available_memory(torch.device("cuda", i), self.processes) for i in gpus)

    def largest_rows(self, shapes: Transformer, processes: int) -> int:
        """Return how many sequences a micro-batch may have, so that each of `processes` has enough
        memory to train a model without compilation; 0 if it cannot train the model."""
        work = replace(self.inputs.workload(processes, self.device, False), shapes=shapes)
        # With accumulation, DDP needs buckets beside the gradients.
        work = replace(work, args=replace(work.args, accumulation_steps=2))
        return largest_batch(self.strategy, work, self.free_memory())

    def assumed(self, model: Candidate) -> Speed:
        """Return the speed at an assumed number of FLOP/s, corrected by the last measurement."""
        precision = self.inputs.args.matrix_precision
        flops = assumed_flops(precision, self.request.machines, self.processes) / self.slowness
        step = model.rows * model.length * model.flops / flops
        return Speed(step, self.sample_share * step / max(1, model.rows))

    def measured(self, model: Candidate, flags: dict[str, Any]) -> Speed:
        """Measure the speed without compilation. If the time for measuring is over, return the
        assumed speed. `flags` are those of the run. Raises errors as `measure` does."""
        case = model.name, model.rows
        if case not in self._known:
            begun = time.time()
            if self.processes > 1 and not model.rows_alone:
                print(f"{model.name}: one process alone has too little memory to be measured")
                return self.assumed(model)
            if self.last and begun + self.last > self.until:
                return self.assumed(model)
            speed = self.measure(model, flags, self.thread_counts)
            self._known[case] = speed, self.threads
            self.last, self.slowness = time.time() - begun, 1.0
            self.slowness = speed.micro_batch / self.assumed(model).micro_batch
            self.sample_share = speed.sample * max(1, model.rows) / speed.micro_batch
        speed, self.threads = self._known[case]
        return speed

    def measure(
        self, model: Candidate, flags: dict[str, Any], threads: tuple[int, ...], compiled=False
    ) -> Speed:
        """Measure the speed in this process alone, with each number of threads, and return the
        highest. If one process has memory for fewer sequences than each process of the run, the
        time is scaled up."""
        rows = min(model.rows, model.rows_alone)
        if rows < model.rows:
            print(f"{model.name}: measured with {rows} of {model.rows} sequences, scaled up")
        flags = flags | {"batch_size": rows, "compile": "on" if compiled else "off"}
        found = measure(self.request.kind, flags, threads, self.seconds)
        self.threads = found.threads
        return Speed(found.step * model.rows / rows, found.sample)
