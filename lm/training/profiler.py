"""Measure the time of each phase of a step: waiting for data, forward, backward, optimizer."""

import time
from contextlib import ExitStack
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs

from lm.common.errors import one_line
from lm.training.arguments import TrainingArguments

PHASES = ("data", "forward", "backward", "optimizer")
KEPT_TRACES = 10  # traces per rank; older ones are deleted, so that they do not fill the disk


class StepProfiler:
    """Measure one step in every --profile_interval steps. A phase includes the wait for the GPU.
    The trace in `folder` has only the last micro-batch and the optimizer, to stay small."""

    def __init__(self, accelerator: Accelerator, folder: Path, args: TrainingArguments):
        self.accelerator, self.folder, self.args = accelerator, folder, args
        self._seconds: dict[str, float] = {}  # seconds per phase; {} if the step is not measured
        self._phase, self._since = "", 0.0  # the current phase and the time when it began
        self._micro_batches, self._trace = 0, None
        self._label, self._recording = ExitStack(), ExitStack()

    def begin_step(self, step: int) -> None:
        """Begin to measure the step, if it is due."""
        if self.args.profile and step % self.args.profile_interval == 0:
            self._seconds, self._micro_batches = dict.fromkeys(PHASES, 0.0), 0
            self.phase("data")

    def phase(self, name: str) -> None:
        """End the current phase and begin the phase `name`, one of PHASES."""
        if not self._seconds:
            return
        self._end_phase()
        self._micro_batches += name == "forward"
        if name == "forward" and self._micro_batches == self.args.accumulation_steps:
            self._trace = self._recording.enter_context(self.accelerator.profile(ProfileKwargs()))
        self._label.enter_context(torch.profiler.record_function(name))
        self._phase, self._since = name, self._now()

    def end_step(self, step: int) -> tuple[dict[str, float], str] | None:
        """Write the trace of a measured step; return (seconds of phases and step, log line)."""
        if not self._seconds:
            return None
        self._end_phase()
        self._recording.close()
        seconds, self._seconds = self._seconds, {}
        total = sum(seconds.values())
        shares = (f"{name} {part:.3f} s ({part / total:.1%})" for name, part in seconds.items())
        rank = f"rank{self.accelerator.process_index}"
        path = self.folder / f"step-{step:08d}-{rank}.json.gz"
        trace = f"trace: {path}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._trace.export_chrome_trace(str(path))
            for old in sorted(self.folder.glob(f"step-*-{rank}.json.gz"))[:-KEPT_TRACES]:
                old.unlink()
        except Exception as error:  # a trace must not end a run
            trace = f"TRACE NOT WRITTEN: {one_line(error)}"
        line = f"profile of step {step}: {total:.3f} s  {'  '.join(shares)}  {trace}"
        return seconds | {"step": total}, line

    def _end_phase(self) -> None:
        if self._phase:
            self._seconds[self._phase] += self._now() - self._since
            self._label.close()
            self._phase = ""

    def _now(self) -> float:
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
