"""Where the time of a step goes: waiting for data, forward, backward, optimizer."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs

from training.arguments import TrainingArguments

PHASES = ("data", "forward", "backward", "optimizer")
TOP_OPERATORS = 10
KEPT_TRACES = 10  # newest ones, per rank: a long run would fill the disk with them


class StepProfiler:
    """Measures one optimizer step in every `interval`; in the steps between, `phase` does nothing.

    In a measured step the device is synchronised at the borders of each phase, so that times are
    true on a GPU as well. The trace records the last micro-batch and the optimizer: with dozens of
    micro-batches that look alike a trace of all of them would be too large to open.

    Under DeepSpeed the optimizer steps inside `accelerator.backward`; its time is measured there
    and taken from backward's.

    Args:
        accelerator: after `prepare`.
        model: as prepared.
        folder: where traces are written.
        args: profile, profile_interval and accumulation_steps count here.
    """

    def __init__(self, accelerator: Accelerator, model, folder: Path, args: TrainingArguments):
        self.accelerator, self.model, self.folder = accelerator, model, folder
        self.interval = args.profile_interval if args.profile else 0
        self.accumulation_steps = args.accumulation_steps
        self.seconds: dict[str, float] | None = None  # of the step being measured

    def phase(self, name: str):
        """Context of one phase of a micro-batch; "data" begins a micro-batch."""
        return nullcontext() if self.seconds is None else self._measure(name)

    def begin_step(self, step: int) -> None:
        if self.interval == 0 or step % self.interval:
            return
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._micro_batches = 0
        self._engine_seconds = 0.0
        if hasattr(self.model, "get_global_grad_norm"):  # a DeepSpeed engine
            self._engine_step, self.model.step = self.model.step, self._timed_engine_step
        self._started = self._now()

    def end_step(self, step: int) -> tuple[dict[str, float], str] | None:
        """In a measured step, the seconds of each phase and of all, and a report; else None."""
        if self.seconds is None:
            return None
        seconds, self.seconds = self.seconds, None
        seconds["step"] = self._now() - self._started
        self._context.__exit__(None, None, None)
        if hasattr(self, "_engine_step"):
            del self.model.step, self._engine_step
            seconds["backward"] -= self._engine_seconds
        return seconds, self._report(step, seconds) + self._export(step)

    @contextmanager
    def _measure(self, name: str) -> Iterator[None]:
        if name == "data":
            self._micro_batches += 1
            if self._micro_batches == self.accumulation_steps:
                self._context = self.accelerator.profile(ProfileKwargs())
                self._trace = self._context.__enter__()
        start = self._now()
        with torch.profiler.record_function(name):
            yield
        self.seconds[name] += self._now() - start

    def _now(self) -> float:
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _timed_engine_step(self, *args, **kwargs):
        before = self.seconds["optimizer"]
        with self._measure("optimizer"):
            result = self._engine_step(*args, **kwargs)
        self._engine_seconds += self.seconds["optimizer"] - before
        return result

    def _export(self, step: int) -> str:
        """Write the trace, drop the oldest beyond KEPT_TRACES, and say where it is."""
        rank = f"rank{self.accelerator.process_index}.json.gz"
        path = self.folder / f"step-{step:08d}-{rank}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._trace.export_chrome_trace(str(path))
            for old in sorted(self.folder.glob(f"step-*-{rank}"))[:-KEPT_TRACES]:
                old.unlink()
        except OSError as error:
            return f"TRACE NOT WRITTEN: {error}"
        return f"trace: {path}"

    def _report(self, step: int, seconds: dict[str, float]) -> str:
        shares = "  ".join(
            f"{name} {seconds[name]:.3f} s ({seconds[name] / seconds['step']:.1%})"
            for name in PHASES
        )
        sort = (
            "self_device_time_total"
            if self.accelerator.device.type == "cuda"
            else "self_cpu_time_total"
        )
        table = self._trace.key_averages().table(
            sort_by=sort, row_limit=TOP_OPERATORS, max_name_column_width=40, max_src_column_width=0
        )
        return f"profile of step {step}: {seconds['step']:.3f} s  {shares}\n{table}"
