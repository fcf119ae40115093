"""What a run measures and reports: mean loss, speed, log lines, metrics.jsonl and trackers."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from common.atomic import write_whole
from common.numbers import progress_bar
from report.history import number, read_rows
from training.engine.device import device_name, matrix_precision, mfu, peak_flops, peak_memory_bytes

ABOVE_IN_A_ROW = 3  # reports with a loss above the first one that make a warning


class LossMeter:
    """Collect losses on the device, because asking for a number waits for a GPU.

    A step whose gradient norm is not finite changes no weights. It counts as skipped and is left
    out of the means.

    Args:
        parts: names of further means that each micro-batch has besides its loss.
    """

    def __init__(self, accelerator: Accelerator, parts: tuple[str, ...] = ()):
        self.accelerator = accelerator
        self.names = ("loss", *parts, "weight")
        device = accelerator.device
        # Weighted sums of the loss and the parts, and the sum of the weights: of the step under
        # way, and of the steps since the last report.
        self._step = torch.zeros(len(self.names), device=device)
        self._sums = torch.zeros_like(self._step)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)  # of the whole run
        self._bad_in_row = torch.zeros_like(self._skipped)

    def add(self, weight: float, **means: Tensor) -> None:
        """Add the detached means of a micro-batch; `weight` is its number of targets that count,
        as a share of a full micro-batch's."""
        self._step[:-1].add_(torch.stack([means[name] for name in self.names[:-1]]), alpha=weight)
        self._step[-1] += weight

    def end_step(self, grad_norm: float | Tensor) -> None:
        """Count the step, or skip it where its gradient norm is not finite."""
        good = torch.as_tensor(grad_norm, device=self._step.device).isfinite()
        self._sums += self._step.where(good, 0.0)
        self._bad_in_row = (self._bad_in_row + 1).where(~good, 0)
        self._skipped += ~good
        self._step.zero_()

    def bad_in_row(self) -> int:
        """Return the number of steps skipped since the last one that counted; wait for a GPU."""
        return int(self._bad_in_row)

    def skipped_steps(self) -> int:
        """Return the number of steps skipped in the whole run; wait for a GPU."""
        return int(self._skipped)

    def take(self, tokens: int) -> tuple[dict[str, float | None], float]:
        """Return the means over all processes since the last call, and the sum of `tokens`.

        A mean is None where every step was skipped. Every process must call it.
        """
        tokens_here = torch.tensor([tokens], device=self._sums.device)
        sums = self.accelerator.reduce(torch.cat([self._sums, tokens_here]))
        *totals, weight, tokens = sums.tolist()
        self._sums.zero_()
        means = [total / weight if weight else None for total in totals]
        return dict(zip(self.names[:-1], means, strict=True)), tokens

    def state(self) -> dict[str, float]:
        """Return what a resumed run goes on with."""
        sums = dict(zip(self.names, self._sums.tolist(), strict=True))
        return sums | {"skipped_steps": self.skipped_steps()}

    def load_state(self, states: list[dict[str, float]], rank: int) -> None:
        """Go on with what the ranks of a checkpoint saved; other ranks share the sum equally."""
        processes = self.accelerator.num_processes
        if len(states) == processes:
            states, processes = [states[rank]], 1
        sums = [sum(state[name] for state in states) / processes for name in self.names]
        self._sums.copy_(torch.tensor(sums))
        self._skipped.fill_(int(states[0]["skipped_steps"]))


class StepClock:
    """Time since its making; a new one is made at each report."""

    def __init__(self):
        self.steps = 0
        self.tokens = 0  # of this process, without padding
        self.paused = 0.0  # seconds
        self.began = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds, with pauses."""
        return time.perf_counter() - self.began

    @property
    def seconds(self) -> float:
        """Seconds of training, without pauses."""
        return self.elapsed - self.paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the time in here out of `seconds`."""
        start = time.perf_counter()
        yield
        self.paused += time.perf_counter() - start


@dataclass
class TrainingLog:
    """Report every `log_interval` steps, at the first and at the last step.

    Throughput leaves out pauses and the first step of a start, which compiles and fills caches.
    """

    accelerator: Accelerator  # as prepared; only its main process writes
    path: Path  # metrics.jsonl; `open` drops the rows of `first_step` and later
    _: KW_ONLY
    log_interval: int
    tokens_per_step: float  # of all processes together, on average
    flops_per_token: float
    total_steps: int  # of the run
    first_step: int  # of this start
    parts: tuple[str, ...] = ()  # names of the means that each micro-batch has besides its loss
    name: str = ""  # begins every line, where several runs have a log and no progress bar

    def __post_init__(self):
        self.meter = LossMeter(self.accelerator, self.parts)
        before = (row.get("loss") for row in read_rows(self.path) if row["step"] < self.first_step)
        self.first_loss = next((loss for loss in before if loss is not None), None)  # of the run
        self.above = 0  # reports in a row with a loss above the first one
        self.clock = StepClock()
        self.bar = progress_bar(
            self.total_steps,
            "step",
            "step",
            initial=self.first_step - 1,
            disable=bool(self.name) or not self.accelerator.is_main_process,
        )
        precision = matrix_precision(self.accelerator.mixed_precision)
        self._peak = peak_flops(device_name(self.accelerator.device), precision)
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
        skipped, speed, utilisation = self.meter.skipped_steps(), None, None
        timing = f"{per_step:.1f} s for the first step, which is slower than the others"
        if step != self.first_step:
            speed = round(tokens / seconds, 1)
            processes = self.accelerator.num_processes
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
            "skipped_steps": skipped,
            "tokens_per_second": speed,
            "step_seconds": round(per_step, 4),
            "mfu": utilisation,
            "memory_gib": round(peak_memory_bytes(self.accelerator.device) / 2**30, 2),
        }
        self._write(values, "train")
        shown = "  ".join(f"{name} {_show(mean)}" for name, mean in means.items())
        self.bar.set_postfix_str(f"loss {_show(means['loss'])}", refresh=False)
        self.say(
            f"step {step}/{self.total_steps}  {shown}  lr {learning_rate:.2e}  "
            f"grad_norm {grad_norm:.3f}  {timing}" + f"  skipped {skipped}" * bool(skipped)
        )
        self._warn(step, means["loss"])

    def _warn(self, step: int, loss: float | None) -> None:
        """Warn where the loss, None of skipped steps, stays above the first one."""
        if self.first_loss is None:
            self.first_loss = loss
            return
        self.above = self.above + 1 if loss is None or not loss <= self.first_loss else 0
        if self.above == ABOVE_IN_A_ROW:
            self.say(
                f"WARNING: the loss is {_show(loss)} at step {step} and was {self.first_loss:.4f} "
                "at first: try lower rates (--learning_rate, --muon_learning_rate)"
            )

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
                print(f"{self.name}  {text}" if self.name else text, flush=True)

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
        known = {f"{section}/{k.removeprefix('val_')}": v for k, v in values.items()}
        try:
            self.accelerator.log({k: v for k, v in known.items() if v is not None}, step=step)
        except OSError as error:
            self.say(f"NOT LOGGED to the trackers: {error}")


def _show(loss: float | None) -> str:
    return "n/a" if loss is None else f"{loss:.4f}"


def as_time(seconds: float) -> str:
    """Return a duration as h:mm:ss, or m:ss below an hour."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def drop_rows_from(path: Path, step: int) -> None:
    """Take the rows of this step and later, which are written again, out of a file of JSON lines.
    Step 1 drops all rows."""
    if path.exists():
        rows = [row for row in read_rows(path) if row["step"] < step and step > 1]
        write_whole(path, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
