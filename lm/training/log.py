"""The log of a run: speed, log lines, metrics.jsonl and trackers."""

import hashlib
import importlib.util
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import isfinite
from pathlib import Path

from accelerate import Accelerator
from accelerate.tracking import filter_trackers
from torch import Tensor

from lm.common.atomic import write_whole
from lm.common.errors import UsageError, one_line, reported
from lm.engine.hardware import device_name, peak_flops, peak_memory_bytes
from lm.report.history import read_rows
from lm.training.inputs import Inputs
from lm.training.loss_meter import LossMeter
from model.experts import ROUTING


class TrainingLog:
    """Report at step 1, every `log_interval` steps and at the last step. The throughput leaves out
    the first step after a start, which may compile. `name`, if any, is printed before messages."""

    def __init__(self, inputs: Inputs, accelerator: Accelerator, name: str = ""):
        self.accelerator, self.name = accelerator, name
        self.inputs, self.args, self.folder = inputs, inputs.args, inputs.start.folder
        self.first_step, self.total_steps = inputs.start.step + 1, inputs.total_steps
        self.samples_per_step = self.args.global_batch(accelerator.num_processes)
        routing = ROUTING if inputs.config.use_moe else ()
        self.meter = LossMeter(accelerator, (*self.args.logged, *routing))
        # Since the last report; before the first report, since the start or step 1.
        self._steps, self._began = 0, time.perf_counter()
        self.paused = 0.0  # seconds
        self._peak = peak_flops(device_name(accelerator.device), self.args.matrix_precision)
        self._file = None  # metrics.jsonl; None before `open`, and always on other processes
        self._unwritten = b""  # rows that could not be written yet

    def open(self) -> None:
        """Open metrics.jsonl; remove rows of steps that will be trained again."""
        first = self.first_step
        if self.accelerator.is_main_process:
            for path in filter(Path.exists, (self.folder.metrics, self.folder.samples)):
                rows = read_rows(path) if first > 1 else []  # a new run starts with no row
                kept = (row for row in rows if row["step"] < first)
                lines = (f"{json.dumps(row, ensure_ascii=False)}\n" for row in kept)
                write_whole(path, "".join(lines))
            # Unbuffered, so that a killed run loses no row.
            self._file = open(self.folder.metrics, "ab", buffering=0)  # noqa: SIM115

    def start_trackers(self, settings: dict) -> None:
        """Start the trackers, on the main process. Raises UsageError if one does not start."""
        first, run = self.first_step, self.folder.path
        self.accelerator.log_with = filter_trackers(self.args.trackers, str(run))
        self.accelerator.project_configuration.logging_dir = str(run)
        # With the same id a resumed run continues its curves. SwanLab needs 21 letters and digits.
        shared = {"id": hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:21]}
        shared |= {"resume": "allow", "config": settings}
        options = {
            "tensorboard": {"purge_step": first},  # hides points of steps that are trained again
            "wandb": {"name": run.name, "dir": str(run), **shared},
            "swanlab": {"experiment_name": run.name, "logdir": str(run / "swanlog"), **shared},
        }
        project = "tensorboard" if self.args.trackers == ["tensorboard"] else "pretrain"
        try:
            self.accelerator.init_trackers(project, None, options)
        except Exception as error:
            said = f"a tracker does not start ({one_line(error)}); --log_with none trains without"
            raise UsageError(f"--log_with {self.args.log_with}: {said}") from error

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context whose time does not count in the throughput."""
        start = time.perf_counter()
        yield
        self.paused += time.perf_counter() - start

    def end_step(self, step: int, rate: float, grad_norm: float | Tensor) -> None:
        """Count an optimizer step that has ended; report if it is time."""
        self._steps += 1
        self.meter.end_step(grad_norm)
        is_due = step % self.args.log_interval == 0 or step in (1, self.total_steps)
        if is_due:
            self._report(step, rate, float(grad_norm))
        if is_due or step == self.first_step:
            float(grad_norm)  # waits, so that the GPU is idle when the clock starts
            self._steps, self.paused, self._began = 0, 0.0, time.perf_counter()

    def _report(self, step: int, rate: float, grad_norm: float) -> None:
        """Print a log line and write a row of metrics.jsonl."""
        data = self.inputs.train_set
        tokens_per_step = self.samples_per_step * data.tokens_per_sample
        elapsed = time.perf_counter() - self._began
        seconds = elapsed - self.paused
        means = self.meter.take()
        skipped = int(self.meter.skipped_steps)
        speed = utilisation = None
        timing = f"{seconds:.1f} s for the first step, which is slower than the others"
        if step != self.first_step:
            speed = round(self._steps * tokens_per_step / seconds, 1)
            timing = f"{speed:,.0f} tokens/s  "
            if self._peak is not None:
                peak = self._peak * self.accelerator.num_processes
                utilisation = speed * self.inputs.flops_per_token / peak
                timing += f"MFU {utilisation:.1%}  "
            left = int(elapsed / self._steps * (self.total_steps - step))
            timing += f"left {timedelta(seconds=left)}"
        values = {
            "step": step,
            "epoch": round(step * self.samples_per_step / data.samples_per_epoch, 4),
            "tokens": round(step * tokens_per_step),
            **means,
            "learning_rate": rate,
            "grad_norm": grad_norm,
            "skipped_steps": skipped,
            "tokens_per_second": speed,
            "step_seconds": round(seconds / self._steps, 4),
            "mfu": utilisation,
            "memory_gib": round(peak_memory_bytes(self.accelerator.device) / 2**30, 2),
        }
        self._write(values, "train")
        texts = (f"{k} {'n/a' if mean is None else f'{mean:.4f}'}" for k, mean in means.items())
        line = f"step {step}/{self.total_steps}  {'  '.join(texts)}  lr {rate:.2e}  "
        line += f"grad_norm {grad_norm:.3f}  {timing}"
        self.say(f"{line}  skipped {skipped}" if skipped else line)

    def validation(self, step: int, result: dict) -> None:
        """Report the result of `validate` after a step."""
        self._write({"step": step} | {f"val_{key}": value for key, value in result.items()}, "val")
        self.say(
            f"step {step}/{self.total_steps}  validation loss {result['loss']:.4f}  "
            f"perplexity {result['perplexity']:.4g}  bits per byte {result['bits_per_byte']:.4f}"
        )
        if "gzip" in result:
            self.say(
                f"bits per byte of the same text: untrained model {result['untrained']:.2f}, "
                f"gzip -9 {result['gzip']:.2f}, xz -9 {result['xz']:.2f}"
            )

    def profile(self, step: int, seconds: dict[str, float], line: str) -> None:
        """Write the seconds of a step and of its phases to metrics.jsonl, and print `line`."""
        phases = {f"{name}_seconds": round(s, 5) for name, s in seconds.items()}
        self._write({"step": step} | phases, "profile")
        self.say(line)

    def say(self, text: str) -> None:
        """Print on the main process. An error while writing, such as a full disk, is ignored."""
        if self.accelerator.is_main_process:
            with suppress(OSError):
                print(f"{self.name}  {text}" if self.name else text, flush=True)

    def close(self) -> None:
        for tracker in self.accelerator.trackers:
            with reported(tracker.name, self.say):
                tracker.finish()
        self.accelerator.trackers = []  # Accelerate would finish them again
        if self._file is not None:
            self._file.close()

    def _write(self, values: dict, section: str) -> None:
        """Add a row to metrics.jsonl and to the trackers. An error does not stop training."""
        if self._file is None:
            return
        # Other programs reject NaN in JSON.
        values = {k: v if v is not None and isfinite(v) else None for k, v in values.items()}
        self._unwritten += json.dumps(values).encode() + b"\n"
        step = values.pop("step")
        names = {name: f"{section}/{name.removeprefix('val_')}" for name in values}
        tracked = {names[name]: value for name, value in values.items() if value is not None}
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            self.say(f"NOT WRITTEN: {error}; rows not in {self.folder.metrics} are in memory")
        for tracker in self.accelerator.trackers:
            with reported(tracker.name, self.say):
                tracker.log(tracked, step=step)


def require_trackers(names: list[str]) -> None:
    """Raise UsageError if the package of a tracker is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"--log_with {name}: the package is missing (pip install {name})")
