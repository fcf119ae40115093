"""Compare the speed of the training step with other projects on the same work.

    python -m benchmarks.throughput --sizes 26m

The first chosen contender in the order of the table, A, is the baseline. It first takes turns
alone. Each other one first takes one turn alone, then turns with A: A B A B A B. If the speed of
the machine drifts, the ratio of two contenders within one round is more reliable than their speeds;
the table has the median of these ratios. At most two contenders are in memory at a time.
--contenders takes names, such as ours-zero2-compiled, and groups: all, ours, peers, transformers
and litgpt. The groups blocks, selective, muon and uncoalesced are variants of ours; `all` and
`ours` omit them.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from zipfile import ZipFile

import torch

from benchmarks.cli import heading, new_parser, say, spread, table
from benchmarks.contenders import Contender, Runner, RunnerError, all_contenders, select
from benchmarks.ours import synchronize
from benchmarks.work import DATA, SIZES, Work
from lm.common.errors import UsageError, one_line_errors, stop_in_order
from lm.common.numbers import memory
from lm.engine.hardware import peak_flops, set_threads

PROGRAM = "benchmarks.throughput"
REPEATS = 5  # measurements of each product
# (m, k, n) of products (m, k) × (k, n). Which product is fastest depends on the machine. Of "cpu",
# the second is a feed-forward layer of the 26m model, the third is the output layer of this model.
PRODUCTS = {
    "cpu": ((2048, 2048, 2048), (4096, 512, 1408), (4096, 512, 6400)),
    "cuda": ((4096, 4096, 4096), (8192, 8192, 8192)),
}
NOTE = (
    "Speeds are medians over turns; in brackets are the lowest and the highest turn. The speed of "
    "a turn is the median of its steps, on a GPU their mean. For N parameters, model FLOPs are "
    "6·N + 12·n_layers·n_heads·head_dim·seq_len per token. Memory is the peak of the process; on a "
    "CPU it includes libraries; expected memory does not. The first step includes the start."
)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The measurements of one turn of a contender."""

    contender: str
    round: int  # contenders with turns in the same round can be compared
    tokens_per_second: float
    flops_per_second: float  # model FLOPs
    peak_flops: float | None  # FLOP/s of the GPU by its data sheet; None: unknown
    peak_bytes: int  # peak memory of the process so far
    expected_bytes: int | None  # estimate without libraries; None for other projects
    first_step_seconds: float  # from the start of the process


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    with one_line_errors(PROGRAM, UsageError):
        options = parse_options(argv)
        print(f"{heading(PROGRAM, argv)}\n\n{NOTE}\n", flush=True)
        failed = []
        for size, work in options.works.items():
            with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
                session = Session(size, work.on(options.data), options, Path(folder))
                try:
                    session.measure()
                finally:  # after an error or Ctrl-C, print the rounds so far
                    session.close()
                    print(session.section(), flush=True)
                failed += [f"{size}: {name}: {why}" for name, why in session.failed.items()]
        if failed:
            raise UsageError(f"not measured to the end: {'; '.join(failed)}")


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Return the flags, with the chosen Contenders, and `works`, which maps a size to its Work.

    Raises UsageError for a wrong flag or an unknown contender.
    """
    has_gpu = torch.cuda.is_available()
    parser = new_parser(PROGRAM, __doc__)
    add = parser.add_argument
    sizes = ["26m", "104m", "360m"] if has_gpu else ["26m", "104m"]
    add("--sizes", nargs="+", choices=SIZES, default=sizes)
    known = "names or groups: all, ours, peers, muon, ..."
    add("--contenders", nargs="+", default=["all"], help=known)
    add("--rounds", type=int, default=5, help="rounds of each contender with the first")
    add("--steps", type=int, default=10 if has_gpu else 3, help="steps per turn")
    add("--warmup_steps", type=int, default=3, help="untimed steps after the first step")
    add("--batch_size", type=int, help="sequences per micro-batch (default: by --sizes)")
    add("--seq_len", type=int, help="tokens per sequence (default: by --sizes)")
    add("--accumulation_steps", type=int, default=1, help="micro-batches per step")
    add("--dtype", choices=("bfloat16", "float32"), help="default: by --sizes")
    add("--data", default=DATA, help="folder of prepared text")
    add("--traces", type=Path, help=".zip to which a trace of each contender of ours is added")
    options = parser.parse_args(argv)
    options.contenders = select(all_contenders(has_gpu), options.contenders)
    shape = ("batch_size", "seq_len", "accumulation_steps", "dtype")
    given = {name: value for name in shape if (value := getattr(options, name)) is not None}
    options.works = {size: replace(SIZES[size], **given) for size in options.sizes}
    return options


class Session:
    """The measurements of the contenders of one size.

    Args:
        size: the name of the work.
        options: see `parse_options`.
        folder: temporary, for logs and traces.
    """

    def __init__(self, size: str, work: Work, options: argparse.Namespace, folder: Path):
        self.size, self.work, self.options, self.folder = size, work, options, folder
        self.turns: list[Turn] = []
        self.profiles: list[dict] = []  # seconds of the phases of one step, of contenders of ours
        self.failed: dict[str, str] = {}  # name → reason
        self.rounds = 0  # number of rounds that have begun
        self.product_flops = matrix_flops(getattr(torch, work.dtype))
        self._running: dict[Contender, Runner] = {}
        self._first_steps: dict[Contender, float] = {}  # seconds until its first step has ended

    def measure(self) -> None:
        """Measure all rounds in the order that the module's docstring describes."""
        playing: list[Contender] = []  # the baseline, and another one
        for contender in self.options.contenders:
            playing.append(contender)
            try:
                self._start(contender)
                self._take_turns(contender)
                self._profile(contender)
                for _ in range(self.options.rounds):
                    self._take_turns(*playing)
            except RunnerError as error:
                self._drop(error)
                playing.remove(error.contender)
                if error.contender != contender:  # the baseline
                    return
            for other in playing[1:]:
                playing.remove(other)
                self._running.pop(other).close()

    def close(self) -> None:
        """End every process."""
        for runner in self._running.values():
            runner.close()

    def section(self) -> str:
        """Return the Markdown section with the table."""
        work = self.work
        parts = [
            f"### {self.size}: {work.counts[0] / 1e6:.2f} million parameters",
            f"dim {work.dim}, {work.n_layers} layers, {work.n_heads} heads, {work.n_kv_heads} kv "
            f"heads; {work.batch_size} × {work.seq_len} tokens × {work.accumulation_steps} "
            f"accumulation per step; {work.dtype}. Matrix products alone reach "
            f"{self.product_flops / 1e12:.3g} TFLOP/s here.",
        ]
        if self.turns:
            parts.append(table(table_rows(self.turns)))
        if self.profiles:
            parts += ["Seconds of the phases of one step:", table(self.profiles)]
        return "\n\n".join(parts) + "\n"

    def _start(self, contender: Contender) -> None:
        """Start a contender and let it warm up."""
        say(f"{self.size}: {contender.name} starts")
        (folder := self.folder / contender.name).mkdir()
        runner = self._running[contender] = Runner(contender, self.work, folder / "log")
        runner.ask(0)  # answered after the first step
        seconds = self._first_steps[contender] = time.monotonic() - runner.started
        runner.ask(self.options.warmup_steps)
        say(f"first step after {seconds:.1f} s")

    def _take_turns(self, *contenders: Contender) -> None:
        """Measure one round."""
        work, on_gpu = self.work, torch.cuda.is_available()
        precision = "bf16" if work.dtype == "bfloat16" else "fp32"
        sheet = peak_flops(torch.cuda.get_device_name(), precision) if on_gpu else None
        self.rounds += 1
        for contender in contenders:
            answer = self._running[contender].ask(self.options.steps)
            speed = work.tokens / statistics.median(answer["seconds"])
            turn = Turn(
                contender=contender.name,
                round=self.rounds,
                tokens_per_second=speed,
                flops_per_second=speed * work.counts[1],
                peak_flops=sheet,
                peak_bytes=answer["peak_bytes"],
                expected_bytes=answer["expected_bytes"],
                first_step_seconds=self._first_steps[contender],
            )
            self.turns.append(turn)
            say(f"{contender.name}: {speed:,.0f} tokens/s")

    def _profile(self, contender: Contender) -> None:
        """Let a contender of ours trace one step, if traces are wanted."""
        if self.options.traces is None or contender.family != "ours":
            return
        folder = self.folder / contender.name
        seconds = self._running[contender].ask(folder)
        rounded = {phase: round(each, 4) for phase, each in seconds.items()}
        self.profiles.append({"contender": contender.name} | rounded)
        work = f"{self.size}-{self.work.accumulation_steps}-{contender.name}"
        with ZipFile(self.options.traces, "a") as archive:
            for trace in sorted(folder.glob("*.json.gz")):
                archive.write(trace, f"{work}-{trace.name}")

    def _drop(self, error: RunnerError) -> None:
        runner = self._running.pop(error.contender)
        self.failed[error.contender.name] = str(error)
        say(f"{error.contender.name} failed: {error}\n{runner.last_lines()}")


def table_rows(turns: Iterable[Turn]) -> list[dict]:
    """Return one row of a table per contender. Ratios are to the first contender, within rounds."""
    played: dict[str, list[Turn]] = {}
    for turn in turns:
        played.setdefault(turn.contender, []).append(turn)
    baseline = next(iter(played.values()), [])
    reference = {turn.round: turn.tokens_per_second for turn in baseline}
    rows = []
    for own in played.values():
        last, known = own[-1], own[-1].peak_flops is not None
        speeds = {turn.round: turn.tokens_per_second for turn in own}
        ratios = [speeds[n] / reference[n] for n in speeds if n in reference]
        flops = statistics.median(turn.flops_per_second for turn in own)
        rows.append(
            {
                "contender": last.contender,
                "tokens/s": spread(list(speeds.values()), ",.0f"),
                "ratio": "1" if own is baseline else spread(ratios, ".3f") if ratios else "n/a",
                "TFLOP/s": f"{flops / 1e12:.3g}",
                "MFU": f"{flops / last.peak_flops:.1%}" if known else "n/a",
                "memory": memory(last.peak_bytes),
                "expected": memory(last.expected_bytes) if last.expected_bytes else "n/a",
                "first step, s": f"{last.first_step_seconds:.1f}",
            }
        )
    return rows


def matrix_flops(dtype: torch.dtype) -> float:
    """Return the FLOP/s of matrix products: the median of the repeats, for the fastest shape."""
    set_threads()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    for m, k, n in PRODUCTS[device.type]:
        a = torch.randn(m, k, device=device).to(dtype)
        b = torch.randn(k, n, device=device).to(dtype)
        # Always write to the same memory, so that no page faults are measured.
        out = torch.empty(m, n, device=device, dtype=dtype)
        torch.mm(a, b, out=out)
        seconds = []
        for _ in range(REPEATS):
            synchronize(device)
            start = time.perf_counter()
            torch.mm(a, b, out=out)
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        found.append(2 * m * k * n / statistics.median(seconds))
    return max(found)


if __name__ == "__main__":
    main()
