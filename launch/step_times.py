"""How long a step of a candidate model takes: measured on this machine, or assumed."""

import json
import os
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from common.atomic import write_whole
from common.numbers import available_cores
from engine.compilation import CACHE
from engine.hardware import available_memory, matrix_precision, peak_flops
from engine.memory import Kind, largest_batch
from launch.recipe import Candidate
from launch.shell_variables import ShellVariables
from model import Transformer
from training.inputs import Inputs
from training.measurement import measure_steps

# Assumed FLOP/s of a CPU core, peak FLOP/s of an unknown GPU, share of the peak that a GPU reaches.
CORE_FLOPS, GPU_PEAK, GPU_SHARE = 5e10, 1e14, 0.3
COMPILING = CACHE / "seconds.json"  # name of a compiled model → most seconds that compiling took
COMPILE_SECONDS = 15.0  # without an entry: 16 s on an older CPU, 10 s on an H200
CACHED_SECONDS = 2.0  # loading compiled code that is in the cache takes about so long


def assumed_flops(precision: str, machines: int, processes: int) -> float:
    """Return the FLOP/s that a process is assumed to reach in training."""
    if torch.cuda.is_available():
        return (peak_flops(torch.cuda.get_device_name(), precision) or GPU_PEAK) * GPU_SHARE
    return CORE_FLOPS * available_cores() * machines / processes


class StepTimes:
    """The seconds of steps with one micro-batch, and the memory for them, of a run with `processes`
    processes under an engine of this `kind`."""

    def __init__(self, request: ShellVariables, inputs: Inputs, kind: Kind, processes: int):
        self.request, self.inputs, self.kind, self.processes = request, inputs, kind, processes
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

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
        return largest_batch(self.kind, work, self.free_memory())

    def assumed(self, model: Candidate) -> float:
        """Return the seconds at an assumed number of FLOP/s."""
        precision = matrix_precision(self.inputs.args.mixed_precision)
        flops = assumed_flops(precision, self.request.machines, self.processes)
        return model.rows * model.length * model.flops / flops

    def measured(self, model: Candidate, flags: dict[str, Any], compiled: bool) -> float:
        """Measure the seconds in this process alone. If one process has memory for fewer sequences
        than each process of the run, the time is scaled up. `flags` are those of the run.

        Raises UsageError if steps cannot be measured, as with a DeepSpeed file that is for several
        processes, and TooLittleMemoryError if the model does not fit."""
        rows = max(1, min(model.rows, model.rows_alone))
        if rows < model.rows:
            print(f"{model.name}: measured with {rows} of {model.rows} sequences, scaled up")
        flags = flags | {"batch_size": rows, "compile": "on" if compiled else "off"}
        threads = None
        if self.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, available_cores() // self.processes)
        time = measure_steps(self.request.kind, flags, threads)
        if compiled:
            self._remember(model, time.first - time.typical)
        return time.typical * model.rows / rows

    def compiling(self, model: Candidate) -> float:
        """Return the seconds that compiling a model will take: CACHED_SECONDS if this machine has
        compiled it before, else the longest time of any; COMPILE_SECONDS if nothing is known."""
        known = self._compile_times()
        longest = max(known.values(), default=COMPILE_SECONDS)
        return CACHED_SECONDS if self._name(model) in known else longest

    def _remember(self, model: Candidate, seconds: float) -> None:
        times, name = self._compile_times(), self._name(model)
        times[name] = max(round(seconds, 1), times.get(name, 0.0))
        with suppress(OSError):  # the next run assumes COMPILE_SECONDS
            write_whole(COMPILING, json.dumps(times, indent=1))

    def _compile_times(self) -> dict[str, float]:
        with suppress(OSError, ValueError):
            return json.loads(COMPILING.read_text(encoding="utf-8"))
        return {}

    def _name(self, model: Candidate) -> str:
        shape = " ".join(f"{name}={value}" for name, value in sorted(model.settings.items()))
        return f"{self.device.type} {self.inputs.args.dtype} {model.rows} × {shape}"
