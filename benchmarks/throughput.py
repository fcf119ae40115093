"""Compare the speed of the training step with other projects on the same work.

    python -m benchmarks.throughput --sizes 26m

Each contender takes turns with the first one, the baseline: A B A B A B, then A C A C A C. If the
speed of the machine drifts, the ratio of two contenders within one round is more reliable than
their speeds, and the median over rounds is better still. Only two are in memory at a time.
--contenders takes names, such as ours-zero2-compiled, and groups: all, ours and peers. The groups
blocks, selective and muon are variants of ours that `all` does not contain.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.cli import heading, names, new_parser, say, spread, table
from benchmarks.contenders import ALLOCATOR, Contender, Team, TeamError, all_contenders, select
from benchmarks.ours import synchronize
from benchmarks.work import DATA, SIZES, Work
from common.errors import UsageError, one_line_errors, stop_in_order
from training.engine.device import peak_flops, use_all_cores
from training.engine.estimate import GIB

PROGRAM = "benchmarks.throughput"
REPEATS = 5  # measurements of each product
# (m, k, n) of products (m, k) × (k, n). The fastest one depends on the machine. The second is a
# feed-forward layer of the 26m model, the third is its output layer.
PRODUCTS = ((2048, 2048, 2048), (4096, 512, 1408), (4096, 512, 6400), (4096, 4096, 4096))
NOTE = (
    "Values are medians over rounds; in brackets are the lowest and the highest round. The value "
    "of a round is the median of its steps. Each contender takes turns with the first; ratios are "
    "taken within a round. Model FLOPs are 6·N + 12·n_layers·n_heads·head_dim·seq_len per "
    "token. Memory is the peak per process. The first step is timed from the start of the process."
)


@dataclass
class Result:
    """The measurements of one contender."""

    contender: Contender
    work: Work
    first_step_seconds: float  # from the start of the process
    peak_bytes: int = 0  # largest peak memory of a process
    step_seconds: dict[int, float] = field(default_factory=dict)  # round → median of its steps

    def speeds(self) -> list[float]:
        """Return the tokens per second of all processes together in each round."""
        tokens = self.work.tokens * self.contender.processes
        return [tokens / seconds for seconds in self.step_seconds.values()]

    def ratios(self, other: "Result") -> list[float]:
        """Return the speed relative to the other contender, for each round of both."""
        ours, theirs = (
            dict(zip(each.step_seconds, each.speeds(), strict=True)) for each in (self, other)
        )
        return [ours[number] / theirs[number] for number in ours.keys() & theirs.keys()]


@dataclass
class SizeReport:
    """The measurements of one model size so far."""

    size: str
    work: Work
    results: dict[Contender, Result] = field(default_factory=dict)  # the baseline first
    missing: dict[str, str] = field(default_factory=dict)  # name → reason, one line
    matrix_products: list[float] = field(default_factory=list)  # FLOP/s
    rounds: int = 0  # number of rounds that have begun
    finished: bool = False


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    with one_line_errors(PROGRAM, UsageError):
        options = parse_options(argv)
        print(f"{heading(PROGRAM, argv)}\n\n{NOTE}\n", flush=True)
        for size, work in options.works.items():
            report = SizeReport(size, work.on(options.data))
            with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
                session = Session(report, options, Path(folder))
                try:
                    session.measure()
                finally:  # after an error or Ctrl-C, print the rounds so far
                    session.close()
                    print(size_table(report), flush=True)


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Return the flags, with the chosen Contenders, and `works`, which maps a size to its Work.

    Raises UsageError if a value cannot work.
    """
    n_gpus = torch.cuda.device_count()
    parser = new_parser(PROGRAM, __doc__)
    add = parser.add_argument
    sizes = "26m,104m,360m" if n_gpus else "26m,104m"
    add("--sizes", type=names(SIZES), default=sizes, help=f"of {', '.join(SIZES)}")
    add("--contenders", default="all", help="names or groups: all, ours, peers, muon, ...")
    add("--rounds", type=int, default=5, help="turns of each contender")
    add("--steps", type=int, default=10 if n_gpus else 3, help="steps per turn")
    add("--warmup_steps", type=int, default=3, help="steps before the first turn")
    add("--batch_size", type=int, help="sequences per micro-batch (default: by --sizes)")
    add("--seq_len", type=int, help="tokens per sequence (default: by --sizes)")
    add("--accumulation_steps", type=int, default=1, help="micro-batches per step")
    add("--processes", type=int, default=n_gpus or 1, help="for DDP and ZeRO")
    add("--data", default=DATA, help="folder of prepared text")
    text = "use PyTorch's compile cache: the first step then does not compile"
    add("--keep_compile_cache", action="store_true", help=text)
    options = parser.parse_args(argv)
    everybody = all_contenders(options.processes, n_gpus > 0)
    options.contenders = select(everybody, options.contenders)
    shape = ("batch_size", "seq_len", "accumulation_steps")
    given = {name: value for name in shape if (value := getattr(options, name)) is not None}
    options.works = {size: replace(SIZES[size], **given) for size in options.sizes}
    return options


class Session:
    """Measure the contenders of one size.

    Args:
        report: receives the measurements.
        options: see `parse_options`.
        folder: temporary, for logs and compiled code.
    """

    def __init__(self, report: SizeReport, options: argparse.Namespace, folder: Path):
        self.report, self.options, self.folder = report, options, folder
        self._teams: dict[Contender, Team] = {}  # running

    def measure(self) -> None:
        """Measure all rounds in the order that the module's docstring describes."""
        waiting = list(self.options.contenders)
        self.report.missing = {contender.name: "no time left" for contender in waiting}
        while waiting and not self._teams:
            self._start(waiting.pop(0))
        if not self._teams:
            return
        (baseline,) = self._teams
        for contender in waiting:
            if self._start(contender):
                self._measure_rounds([baseline, contender])
            if team := self._teams.pop(contender, None):
                team.close()
            if baseline not in self._teams:
                return
        if not self.report.results[baseline].step_seconds:  # no other contender could start
            self._measure_rounds([baseline])
        self.report.finished = True

    def close(self) -> None:
        """End every process."""
        for team in self._teams.values():
            team.close()

    def _start(self, contender: Contender) -> bool:
        """Start a contender and let it warm up; return whether it can take turns."""
        (folder := self.folder / contender.name).mkdir()
        fresh = not self.options.keep_compile_cache
        team = self._teams[contender] = Team(contender, self.report.work, folder, fresh)
        try:
            team.take(0)  # answered after the first step
            seconds = time.monotonic() - team.started
            team.take(self.options.warmup_steps)
        except TeamError as error:
            self._drop(contender, error)
            return False
        self.report.results[contender] = Result(contender, self.report.work, seconds)
        say(f"{self.report.size}: {contender.name}: first step after {seconds:.1f} s")
        return True

    def _measure_rounds(self, contenders: list[Contender]) -> None:
        """Measure all rounds of these contenders, until one of them fails."""
        dtype = getattr(torch, self.report.work.dtype)
        for _ in range(self.options.rounds):
            self.report.rounds += 1
            self.report.matrix_products.append(matrix_flops(dtype))
            for contender in contenders:
                try:
                    answers = self._teams[contender].take(self.options.steps)
                except TeamError as error:
                    self._drop(contender, error)
                    return
                # A step ends when its slowest rank has finished.
                steps = map(max, zip(*(answer["seconds"] for answer in answers), strict=True))
                result = self.report.results[contender]
                result.step_seconds[self.report.rounds] = statistics.median(steps)
                result.peak_bytes = max(answer["peak_bytes"] for answer in answers)
                self.report.missing.pop(contender.name, None)
                say(f"{self.report.size}: {contender.name}: {result.speeds()[-1]:,.0f} tokens/s")

    def _drop(self, contender: Contender, error: TeamError) -> None:
        team = self._teams.pop(contender)
        team.close()
        self.report.missing[contender.name] = str(error)
        say(f"{self.report.size}: {contender.name} failed: {error}\n{team.last_lines()}")


def size_table(report: SizeReport) -> str:
    """Return the Markdown section of one model size."""
    missing = [f"- {name}: {reason}" for name, reason in report.missing.items()]
    played = [result for result in report.results.values() if result.step_seconds]
    if not played:
        return "\n".join([f"### {report.size}\n\nNothing could be measured:\n", *missing])
    work = report.work
    flops = [f"{value / 1e12:.3g}" for value in sorted(report.matrix_products)]
    parts = [
        f"### {report.size}: {work.counts[0] / 1e6:.2f} million parameters",
        f"dim {work.dim}, {work.n_layers} layers, {work.n_heads} heads, {work.n_kv_heads} kv "
        f"heads; {work.batch_size} × {work.seq_len} tokens × {work.accumulation_steps} "
        f"accumulation per process and step; {work.dtype}.",
        f"Matrix products alone reach {flops[len(flops) // 2]} TFLOP/s here in this precision "
        f"({flops[0]} to {flops[-1]}).",
        table([_row(report, result, played[0]) for result in played]),
    ]
    if not report.finished:
        parts.append(f"STOPPED in round {report.rounds}, before the end.")
    if missing:
        parts += ["Not measured:", "\n".join(missing)]
    return "\n\n".join([*parts, f"**{closing_line(report.size, played)}**\n"])


def _row(report: SizeReport, result: Result, baseline: Result) -> dict:
    flops = statistics.median(result.speeds()) * report.work.counts[1]  # per second
    on_gpu = torch.cuda.is_available()
    sheet = peak_flops(torch.cuda.get_device_name(), "bf16") if on_gpu else None
    peak = sheet or statistics.median(report.matrix_products)
    peak *= result.contender.processes if on_gpu else 1
    against = spread(result.ratios(baseline), ".3f")
    return {
        "contender": result.contender.name,
        "processes": result.contender.processes,
        "tokens/s": spread(result.speeds(), ",.0f"),
        f"against {baseline.contender.name}": "1" if result is baseline else against,
        "TFLOP/s": f"{flops / 1e12:.3g}",
        "MFU" if sheet else "of measured peak": f"{flops / peak:.1%}",
        "memory, GiB": f"{result.peak_bytes / GIB:.2f}",
        "first step, s": f"{result.first_step_seconds:.1f}",
    }


def closing_line(size: str, played: list[Result]) -> str:
    """Return our fastest mode compared with the fastest peer, first with the default allocator,
    then with our allocator settings. Speeds are ratios to the baseline's speed."""

    def fastest(is_ours: bool, variant: str = "") -> tuple[float, str] | None:
        wanted = 1, is_ours, variant
        found = []
        for result in played:
            who = result.contender
            if (who.processes, who.family == "ours", who.variant) == wanted:
                found.append((statistics.median(result.ratios(played[0])), who.name))
        return max(found, default=None)

    ours, peer, same = fastest(True), fastest(False), fastest(False, ALLOCATOR)
    line = f"{size}, ours / fastest peer: "
    if not ours or not (peer or same):
        return line + "n/a, because one of them was not measured"
    line += f"{ours[0] / peer[0]:.2f} ({ours[1]} / {peer[1]})" if peer else "n/a"
    return line + (f", same allocator {ours[0] / same[0]:.2f} ({same[1]})" if same else "")


def matrix_flops(dtype: torch.dtype) -> float:
    """Return the FLOP/s of matrix products: the median of the repeats, for the fastest shape. On an
    unknown machine this replaces the peak of the data sheet."""
    use_all_cores()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    for m, k, n in PRODUCTS:
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
