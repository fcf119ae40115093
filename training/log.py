"""What a run reports while it trains: progress bar, log lines, metrics.jsonl and trackers."""

import json
import sys
from contextlib import suppress
from pathlib import Path

from accelerate import Accelerator
from torch import Tensor

from common.atomic import write_whole
from common.progress import progress_bar
from report.history import number, read_rows
from training.engine.device import device_name, matrix_precision, mfu, peak_flops
from training.engine.memory import peak_memory_bytes
from training.meter import LossMeter, StepClock

ABOVE_IN_A_ROW = 3  # reports with a loss above the first one's that make a warning


class TrainingLog:
    """Report every `log_interval` steps, at the first and at the last step.

    Throughput leaves out pauses and the first step of a start, which compiles and fills caches.

    Args:
        accelerator: as prepared; only its main process writes.
        path: metrics.jsonl; `open` drops the rows of `first_step` and later.
        tokens_per_step: of all processes together, on average.
        flops_per_token: see `Transformer.flops_per_token`.
        total_steps: of the run.
        first_step: of this start.
        parts: names of the means that each micro-batch has besides its loss.
        name: begins every line, where several runs have a log; there is no progress bar then.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        path: Path,
        *,
        log_interval: int,
        tokens_per_step: float,
        flops_per_token: float,
        total_steps: int,
        first_step: int,
        parts: tuple[str, ...] = (),
        name: str = "",
    ):
        self.accelerator = accelerator
        self.path = path
        self.log_interval = log_interval
        self.tokens_per_step = tokens_per_step
        self.flops_per_token = flops_per_token
        self.total_steps = total_steps
        self.first_step = first_step
        self.prefix = f"{name}  " if name else ""
        self.meter = LossMeter(accelerator, parts)
        self.divergence = DivergenceWatch(path, first_step)
        self.clock = StepClock()
        self.bar = progress_bar(
            self.total_steps,
            "step",
            "step",
            initial=first_step - 1,
            disable=bool(name) or not accelerator.is_main_process,
        )
        precision = matrix_precision(accelerator.mixed_precision)
        self._peak = peak_flops(device_name(accelerator.device), precision)
        self._file = None
        self._unwritten = b""

    def open(self) -> None:
        """Begin to write the file, once nothing can be refused any more."""
        if self.accelerator.is_main_process:
            drop_rows_from(self.path, self.first_step)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115, closed in close()

    def step(
        self, step: int, learning_rate: float, grad_norm: float | Tensor, epoch: float
    ) -> None:
        """Note that an optimizer step has ended; report where it is time."""
        self.clock.steps += 1
        self.bar.update()
        self.meter.end_step(grad_norm)
        if step % self.log_interval == 0 or step in (1, self.total_steps):
            self._report(step, learning_rate, float(grad_norm), epoch)
            self.clock = StepClock()
        elif step == self.first_step:
            float(grad_norm)  # wait for a GPU
            self.clock = StepClock()

    def _report(self, step: int, learning_rate: float, grad_norm: float, epoch: float) -> None:
        seconds, per_step = self.clock.seconds, self.clock.seconds / self.clock.steps
        left = self.clock.elapsed / self.clock.steps * (self.total_steps - step)
        means, tokens = self.meter.take(self.clock.tokens)
        speed = utilisation = None
        timing = f"{per_step:.1f} s for the first step, which is slower than the others"
        if step != self.first_step:
            processes = self.accelerator.num_processes
            speed = round(tokens / seconds, 1)
            utilisation = mfu(speed, self.flops_per_token, self._peak, processes)
            shown = "" if utilisation is None else f"MFU {utilisation:.1%}  "
            timing = f"{speed:,.0f} tokens/s  {shown}left {as_time(left)}"
        values = {
            "step": step,
            "epoch": round(epoch, 4),
            "tokens": round(step * self.tokens_per_step),
            **means,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "skipped_steps": self.meter.skipped_steps(),
            "tokens_per_second": speed,
            "step_seconds": round(per_step, 4),
            "mfu": utilisation,
            "memory_gib": round(peak_memory_bytes(self.accelerator.device) / 2**30, 2),
        }
        self._write(values, "train")
        shown = "  ".join(f"{name} {_show(mean)}" for name, mean in means.items())
        if means["loss"] is not None:
            self.bar.set_postfix_str(f"loss {means['loss']:.3f}", refresh=False)
        self.say(
            f"step {step}/{self.total_steps}  {shown}  lr {learning_rate:.2e}  "
            f"grad_norm {grad_norm:.3f}  {timing}"
            + (f"  skipped {values['skipped_steps']}" if values["skipped_steps"] else "")
        )
        if warning := self.divergence.check(step, means["loss"], step == self.total_steps):
            self.say(warning)

    def validation(self, step: int, result: dict) -> None:
        self._write({"step": step} | {f"val_{key}": value for key, value in result.items()}, "val")
        self.say(
            f"step {step}/{self.total_steps}  validation loss {result['loss']:.4f}  "
            f"perplexity {result['perplexity']:.4g}  bits per byte {result['bits_per_byte']:.4f}"
        )

    def profile(self, step: int, seconds: dict[str, float], line: str) -> None:
        phases = {f"{name}_seconds": round(s, 5) for name, s in seconds.items()}
        self._write({"step": step} | phases, "profile")
        self.say(line)

    def say(self, text: str) -> None:
        """Print on the main process without tearing the progress bar."""
        if self.accelerator.is_main_process:
            with suppress(OSError):  # a log file on a full disk must not end the run
                if sys.stderr.isatty():
                    self.bar.clear()
                print(f"{self.prefix}{text}", flush=True)

    def close(self) -> None:
        self.bar.close()
        if self._file is not None:
            self._file.close()

    def _write(self, values: dict, section: str) -> None:
        """Add a row to the file, and tell the trackers."""
        if self._file is None:
            return
        values = {name: number(value) for name, value in values.items()}
        self._unwritten += json.dumps(values).encode() + b"\n"
        try:  # unbuffered: a killed run loses nothing that was said
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            self.say(f"NOT WRITTEN: {error}; kept in memory until there is room in {self.path}")
        step = values.pop("step")
        known = {k.removeprefix("val_"): v for k, v in values.items() if v is not None}
        try:
            self.accelerator.log({f"{section}/{k}": v for k, v in known.items()}, step=step)
        except OSError as error:
            self.say(f"NOT LOGGED to the trackers: {error}")


class DivergenceWatch:
    """Warn once where the loss stays above the first loss of the run.

    Args:
        path: metrics.jsonl, in which a resumed run finds its first loss.
        first_step: of this start; rows from it on do not count.
    """

    def __init__(self, path: Path, first_step: int):
        losses = [row.get("loss") for row in read_rows(path) if row["step"] < first_step]
        self.first_loss = next((loss for loss in losses if loss is not None), None)
        self.above = 0  # reports in a row above the first loss
        self.warning: str | None = None

    def check(self, step: int, loss: float | None, is_last: bool) -> str | None:
        """Look at a reported loss, None where every step was skipped; return a new warning."""
        if self.first_loss is None:
            self.first_loss = loss
            return None
        self.above = self.above + 1 if loss is None or not loss <= self.first_loss else 0
        # A run of very few steps has not had the time to learn.
        enough = self.above >= ABOVE_IN_A_ROW or (is_last and self.above and step > 2)
        if self.warning or not enough:
            return None
        self.warning = (
            f"WARNING: the loss is {_show(loss)} at step {step} and was {self.first_loss:.4f} at "
            "first: the model does not learn; try lower rates (--learning_rate, "
            "--muon_learning_rate)"
        )
        return self.warning


def _show(loss: float | None) -> str:
    return "n/a" if loss is None else f"{loss:.4f}"


def as_time(seconds: float) -> str:
    """Return a duration as h:mm:ss, or m:ss below an hour."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def drop_rows_from(path: Path, step: int) -> None:
    """Take the rows of this step and later out of a file of JSON lines.

    A resumed run writes them again. A run that begins again from nothing drops all rows.
    """
    if path.exists():
        rows = [row for row in read_rows(path) if row["step"] < step and step > 1]
        write_whole(path, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
