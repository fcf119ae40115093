"""Where the time of a step goes: waiting for data, forward, backward, optimizer."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs
from torch import nn

from training.arguments import TrainingArguments

PHASES = ("data", "forward", "backward", "optimizer")
TOP_OPERATORS = 10
KEPT_TRACES = 10  # newest ones, per rank: a long run would fill the disk with them


@dataclass
class StepProfiler:
    """Measures one optimizer step in --profile_interval; in the steps between it does nothing.

    In a measured step the device is synchronised wherever one phase gives way to another, so that
    times are true on a GPU as well. The trace records the last micro-batch and the optimizer: with
    dozens of micro-batches that look alike a trace of all of them would be too large to open.

    Under DeepSpeed the optimizer steps inside `accelerator.backward`; that time is the optimizer's
    here.
    """

    accelerator: Accelerator  # after `prepare`
    model: nn.Module  # as prepared
    folder: Path  # where traces are written
    args: TrainingArguments  # profile, profile_interval and accumulation_steps count here
    seconds: dict[str, float] | None = None  # of the step being measured

    def begin_step(self, step: int) -> None:
        if not self.args.profile or step % self.args.profile_interval:
            return
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._phase = self._recorded = None
        self._micro_batches = 0
        if hasattr(self.model, "get_global_grad_norm"):  # a DeepSpeed engine
            self._engine_step, self.model.step = self.model.step, self._timed_engine_step
        self._began = self._now()

    def phase(self, name: str) -> None:
        """This phase begins, and the one before it has ended; "forward" begins a micro-batch.

        (What is read in "data" may be for another one.)
        """
        if self.seconds is None:
            return
        self._end_phase()
        if name == "forward":
            self._micro_batches += 1
            if self._micro_batches == self.args.accumulation_steps:
                self._context = self.accelerator.profile(ProfileKwargs())
                self._trace = self._context.__enter__()
        self._recorded = torch.profiler.record_function(name)
        self._recorded.__enter__()
        self._phase = name
        self._since = self._now()

    def end_step(self, step: int) -> tuple[dict[str, float], str] | None:
        """In a measured step, the seconds of each phase and of all, and a line; else None."""
        if self.seconds is None:
            return None
        self._end_phase()
        seconds, self.seconds = self.seconds, None
        seconds["step"] = self._now() - self._began
        self._context.__exit__(None, None, None)
        if hasattr(self, "_engine_step"):
            del self.model.step, self._engine_step
        shares = "  ".join(
            f"{name} {seconds[name]:.3f} s ({seconds[name] / seconds['step']:.1%})"
            for name in PHASES
        )
        line = f"profile of step {step}: {seconds['step']:.3f} s  {shares}"
        return seconds, f"{line}  {self._export(step)}"

    def _end_phase(self) -> None:
        if self._phase is not None:
            self.seconds[self._phase] += self._now() - self._since
            self._recorded.__exit__(None, None, None)
            self._phase = None

    def _now(self) -> float:
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _timed_engine_step(self, *args, **kwargs):
        before = self._phase
        self.phase("optimizer")
        result = self._engine_step(*args, **kwargs)
        self.phase(before)
        return result

    def _export(self, step: int) -> str:
        """Write the trace and the table, drop the oldest beyond KEPT_TRACES, and say where they
        are."""
        rank = f"rank{self.accelerator.process_index}"
        path = self.folder / f"step-{step:08d}-{rank}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._trace.export_chrome_trace(f"{path}.json.gz")
            path.with_suffix(".txt").write_text(self._table(step), encoding="utf-8")
            for kind in (".json.gz", ".txt"):
                for old in sorted(self.folder.glob(f"step-*-{rank}{kind}"))[:-KEPT_TRACES]:
                    old.unlink()
        except OSError as error:
            return f"TRACE NOT WRITTEN: {error}"
        return f"operators: {path}.txt  trace: {path}.json.gz"

    def _table(self, step: int) -> str:
        """The operators that took longest."""
        on_gpu = self.accelerator.device.type == "cuda"
        table = self._trace.key_averages().table(
            sort_by="self_device_time_total" if on_gpu else "self_cpu_time_total",
            row_limit=TOP_OPERATORS,
            max_name_column_width=40,
            max_src_column_width=0,
        )
        return (
            f"Step {step}, its last micro-batch and the optimizer alone: shares are of what was "
            f"recorded of these, not of the step.\n\n{table}"
        )
