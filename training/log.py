"""What a run tells while it trains: progress bar, log lines, metrics.jsonl and trackers."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from common.atomic import write_whole
from common.progress import progress_bar
from report.history import number
from training.engine.device import device_name, matrix_precision, mfu, peak_flops
from training.engine.usage import peak_memory_bytes, seconds_without_core

# Share of its time that a thread has waited for a core, at least, beside a busy program: measured
# were 0.37 on two cores, and 0.005 alone.
CROWDED = 0.1
ABOVE_IN_A_ROW = 3  # reports with a loss above the first one's, which are a warning


def copied(numbers: Tensor) -> Callable[[], list[float]]:
    """Numbers that a GPU has yet to compute. The function waits for them and gives them, and does
    not wait for what the GPU was asked meanwhile."""
    here = numbers.to("cpu", non_blocking=True)  # pinned memory
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> list[float]:
        arrived.synchronize()
        return here.tolist()

    return read


class EndedStep(NamedTuple):
    number: int
    sums: Tensor  # of loss and parts over its micro-batches
    weight: float  # theirs
    read: Callable[[], list[float]]  # norm of the gradient, loss, and what else stands behind it


@dataclass
class TrainingLog:
    """Collects each step's loss and reports every `log_interval` steps: the mean over all targets
    that counted since the last report, on all processes.

    Losses stay on the device between reports: asking for one waits for the GPU. There a step's
    gradient is judged when the next step has been queued, so that the GPU never runs dry, or sooner
    where a report or the state needs it. Throughput counts training only, not what happens inside
    `pause()`, and not the first step of this start, which compiles and fills caches.
    """

    accelerator: Accelerator  # after `prepare`; only its main process writes
    path: Path  # metrics.jsonl; rows of first_step and later, of an interrupted run, are dropped
    log_interval: int  # steps between reports; the first and the last step report too
    tokens_per_step: float  # of all processes together; where they differ, on average
    flops_per_token: float  # see `Transformer.flops_per_token`
    total_steps: int  # of the run
    first_step: int  # of this start
    parts: tuple[str, ...] = ()  # names of what each micro-batch has the mean of besides its loss

    def __post_init__(self):
        accelerator = self.accelerator
        precision = matrix_precision(accelerator.mixed_precision)
        self.peak = peak_flops(device_name(accelerator.device), precision)
        self._file = None
        self._unwritten = b""
        shown = {"initial": self.first_step - 1, "disable": not accelerator.is_main_process}
        self.bar = progress_bar(self.total_steps, "step", "step", **shown)
        self._sums = torch.zeros(1 + len(self.parts), device=accelerator.device)  # loss and parts
        self._step_sums = torch.zeros_like(self._sums)
        self._weight = self._step_weight = 0.0
        self.skipped_steps = self.bad_in_row = 0
        self.last_bad = 0  # number of the last step that was skipped
        self._late = accelerator.device.type == "cuda"
        self._ended: EndedStep | None = None  # not yet judged
        self.divergence: str | None = None  # a warning, once there is reason for one
        self._first_loss, self._above = None, 0  # of the first report; reports in a row above it
        self._is_crowded = accelerator.device.type != "cpu"  # or nothing is to be said of it
        self.prefix = ""  # of every line that it says, where several runs have a log
        self._left: float | None = None  # when its last turn ended
        self._start_clock()

    def open(self) -> None:
        """Begin to write the file; before the first row, and once the run does start."""
        if self.accelerator.is_main_process:
            drop_rows_from(self.path, self.first_step)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115, closed in close()

    def micro_batch(
        self, loss: Tensor, weight: float = 1.0, tokens: int | None = None, **parts: Tensor
    ) -> None:
        """One micro-batch's mean loss over the targets that count, detached, still on the device;
        how many count, as a share of a full micro-batch's; its tokens without padding, None where
        each step has as many; and means over the same targets by the names in `parts`."""
        means = torch.stack([loss, *(parts[name] for name in self.parts)])
        self._step_sums.add_(means, alpha=weight)
        self._step_weight += weight
        if tokens is not None:
            self._tokens = (self._tokens or 0) + tokens

    def state(self) -> Tensor:
        """Collected since the last report, to go on with after a resume; fp64, as `_weight` is."""
        self._judge()
        loss, *parts = self._sums.tolist()
        return torch.tensor([loss, self._weight, self.skipped_steps, *parts], dtype=torch.float64)

    def load_state(self, state: Tensor) -> None:
        self._sums.copy_(torch.cat([state[:1], state[3:]]))
        self._weight = state[1].item()
        self.skipped_steps = int(state[2])

    def step(
        self, step: int, learning_rate: float, grad_norm: float | Tensor, epoch: float
    ) -> None:
        """An optimizer step has ended. One with a non-finite gradient has changed no weights."""
        self._steps += 1
        self.bar.update()
        self._judge()
        sums, weight = self._step_sums, self._step_weight
        self._step_sums, self._step_weight = torch.zeros_like(sums), 0.0
        if self._late:
            known = not isinstance(grad_norm, Tensor)
            norm = torch.full_like(sums[0], grad_norm) if known else grad_norm
            read = copied(torch.hstack([norm, sums]))
        else:
            read = partial(map, float, (grad_norm, sums[0]))
        self._ended = EndedStep(step, sums, weight, read)
        reports = step % self.log_interval == 0 or step in (1, self.total_steps)
        if reports or step == self.first_step or not self._late:
            self._judge()
        if reports:
            self._report(step, learning_rate, float(grad_norm), epoch)
        elif step == self.first_step:
            self._start_clock()

    def _judge(self) -> None:
        """Count the step that has ended, or leave it out, unless that was done already."""
        if self._ended is None:
            return
        (step, sums, weight, read), self._ended = self._ended, None
        grad_norm, shown_loss, *_ = read()
        if math.isfinite(grad_norm):
            self._sums += sums
            self._weight += weight
            self.bad_in_row = 0
        else:
            self.skipped_steps += 1
            self.bad_in_row += 1
            self.last_bad = step
            self.say(f"step {step}/{self.total_steps}  SKIPPED: gradient norm {grad_norm}")
        if not self.bar.disable and weight:
            speed = self._own_tokens() * self.accelerator.num_processes
            speed /= max(self._seconds(), 1e-9)
            shown = f"loss {shown_loss / weight:.3f}, {speed:,.0f} tokens/s"
            self.bar.set_postfix_str(shown, refresh=False)

    def _start_clock(self) -> None:
        self._last = time.perf_counter()
        self._paused = self._elsewhere = 0.0
        self._waited = seconds_without_core()
        self._steps = 0
        self._tokens: int | None = None  # this process's, where steps differ

    def _own_tokens(self) -> float:
        """Since the clock was started."""
        if self._tokens is not None:
            return self._tokens
        return self._steps * self.tokens_per_step / self.accelerator.num_processes

    def _seconds(self) -> float:
        """That the steps since the last report, or the first step, have taken."""
        return time.perf_counter() - self._last - self._paused - self._elsewhere

    def _report(self, step: int, learning_rate: float, grad_norm: float, epoch: float) -> None:
        means = self._means()
        loss = means["loss"]
        seconds = self._seconds() / self._steps
        tokens_per_second = utilisation = None
        timing = f"{seconds:.1f} s for the first step, which is slower than the others"
        if step != self.first_step:
            all_models = seconds + self._elsewhere / self._steps
            left = int(all_models * (self.total_steps - step))
            processes = self.accelerator.num_processes
            tokens = self._own_tokens()
            if self._tokens is not None:
                tokens = self._mean_of_processes(tokens)
            tokens_per_second = round(tokens * processes / (seconds * self._steps), 1)
            utilisation = mfu(tokens_per_second, self.flops_per_token, self.peak, processes)
            timing = f"{tokens_per_second:,.0f} tokens/s  "
            timing += f"MFU {utilisation:.1%}  " if utilisation is not None else ""
            timing += f"left {left // 60}:{left % 60:02d}"
        values = {
            "step": step,
            "epoch": round(epoch, 4),
            "tokens": round(step * self.tokens_per_step),
            **means,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "skipped_steps": self.skipped_steps,
            "tokens_per_second": tokens_per_second,
            "step_seconds": round(seconds, 4),
            "mfu": utilisation,
            "memory_gib": round(peak_memory_bytes(self.accelerator.device) / 2**30, 2),
        }
        self._write(values, "train")
        shown = "  ".join(f"{name} {_show(mean)}" for name, mean in means.items())
        self.say(
            f"step {step}/{self.total_steps}  {shown}  lr {learning_rate:.2e}  "
            f"grad_norm {grad_norm:.3f}  {timing}"
        )
        self._watch(step, loss)
        if step != self.first_step:  # in which others compile
            self._watch_cores()
        self._sums.zero_()
        self._weight = 0.0
        self._start_clock()

    def _watch(self, step: int, loss: float | None) -> None:
        """Warn once where the loss stays above where it began."""
        if self._first_loss is None:
            self._first_loss = loss
            return
        self._above = self._above + 1 if loss is None or not loss <= self._first_loss else 0
        at_the_end = step == self.total_steps and self._above
        if self.divergence is None and (self._above >= ABOVE_IN_A_ROW or at_the_end):
            self.divergence = (
                f"WARNING: the loss is {_show(loss)} at step {step} and was "
                f"{self._first_loss:.4f} at first: the model does not learn; try lower rates "
                "(--learning_rate, --muon_learning_rate)"
            )
            self.say(self.divergence)

    def _watch_cores(self) -> None:
        """Say once where other programs take the cores from this one."""
        threads, waited = torch.get_num_threads(), seconds_without_core() - self._waited
        seconds = time.perf_counter() - self._last
        if self._is_crowded or threads == 1 or waited <= CROWDED * threads * seconds:
            return
        self._is_crowded = True
        self.say(
            "WARNING: other programs use these cores too, and threads that wait for each other "
            "lose more by it than their share; end them, or leave them a core: "
            f"taskset -c 0-{threads - 2} in front of the command"
        )

    def _means(self) -> dict[str, float | None]:
        """Of loss and parts, on all processes; None where every step since the last report was
        skipped."""
        names, weight = ("loss", *self.parts), self._mean_of_processes(self._weight)
        if weight == 0:
            return dict.fromkeys(names)
        means = self.accelerator.reduce(self._sums / weight, "mean").tolist()
        return dict(zip(names, means, strict=True))

    def _mean_of_processes(self, number: float) -> float:
        """All must call this."""
        here = torch.full_like(self._sums[0], number)
        return self.accelerator.reduce(here, "mean").item()

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

    @contextmanager
    def turn(self) -> Iterator[None]:
        """In here its model is at work, of several that are trained in turn; what lies between two
        turns is the time of the others."""
        if self._left is None:
            self._start_clock()
        else:
            self._elsewhere += time.perf_counter() - self._left
        yield
        if self._late:  # what a GPU has been asked for here, it does in this model's time
            torch.cuda.synchronize(self.accelerator.device)
        self._left = time.perf_counter()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time in here does not count as training."""
        start = time.perf_counter()
        yield
        self._paused += time.perf_counter() - start

    def close(self) -> None:
        self.bar.close()
        if self._file is not None:
            self._file.close()

    def _write(self, values: dict, section: str) -> None:
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


def _show(loss: float | None) -> str:
    return "n/a" if loss is None else f"{loss:.4f}"


def drop_rows_from(path: Path, step: int) -> None:
    """Take rows of this step and later out of metrics.jsonl: a resumed run writes them again, and
    one that begins again what it has written before its first step, too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if json.loads(line)["step"] < step and step > 1:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # a line cut short when the run was killed
    write_whole(path, b"".join(kept))
