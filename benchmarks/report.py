"""From seconds per step to ratios and tables."""

import statistics
from dataclasses import dataclass, field

from benchmarks.contenders import Contender
from benchmarks.markdown import spread, table
from benchmarks.work import Work
from training.engine.device import peak_flops
from training.engine.memory import GIB

NOTE = (
    "Medians over rounds, a round counting with the median of its steps; in brackets the lowest "
    "and the highest round. Ratios are taken within a round. Model FLOPs are "
    "6·N + 12·n_layers·n_heads·head_dim·seq_len per token. Memory is the peak per process, and the "
    "first step counts from its start."
)


@dataclass
class Result:
    """What was measured of one contender."""

    contender: Contender
    tokens_per_step: int  # of all its processes together
    first_step_seconds: float = 0.0  # from the start of the process
    peak_bytes: int = 0  # of one process, the largest
    losses: list[float] = field(default_factory=list)  # at the first step, after each turn
    step_seconds: dict[int, float] = field(default_factory=dict)  # round → median of its steps

    @property
    def name(self) -> str:
        return self.contender.name

    def speeds(self) -> list[float]:
        """Tokens per second in each round."""
        return [self.tokens_per_step / seconds for seconds in self.step_seconds.values()]


@dataclass
class SizeReport:
    """What was measured of one model size, until now."""

    size: str
    work: Work
    gpu: str | None = None  # name of the GPUs that all run on; None: all processes share the CPU
    results: list[Result] = field(default_factory=list)  # as they were started, the baseline first
    missing: dict[str, str] = field(default_factory=dict)  # name → reason, one line
    matrix_products: list[tuple[float, str]] = field(default_factory=list)  # (FLOP/s, shape)
    rounds: int = 0  # begun
    finished: bool = False

    @property
    def played(self) -> list[Result]:
        return [result for result in self.results if result.step_seconds]

    @property
    def baseline(self) -> Result:
        """Whom the others are compared with."""
        return self.played[0]

    @property
    def measured_peak(self) -> float:
        return statistics.median(flops for flops, _ in self.matrix_products)

    @property
    def sheet_peak(self) -> float | None:
        """FLOP/s that a GPU's data sheet states for bfloat16."""
        return peak_flops(self.gpu, "bf16") if self.gpu and self.work.dtype == "bfloat16" else None


def ratios(a: Result, b: Result) -> list[float]:
    """How many times as fast a is as b, in each round that both were in."""
    tokens = a.tokens_per_step / b.tokens_per_step
    shared = a.step_seconds.keys() & b.step_seconds.keys()
    return [tokens * b.step_seconds[i] / a.step_seconds[i] for i in shared]


def compare(report: SizeReport, a: Result, b: Result) -> float:
    """The median of `ratios`; of contenders that never met, by way of the baseline."""
    if met := ratios(a, b):
        return statistics.median(met)
    if report.baseline in (a, b):  # it has failed since, and this is another one
        return statistics.median(a.speeds()) / statistics.median(b.speeds())
    return compare(report, a, report.baseline) * compare(report, report.baseline, b)


def fastest(report: SizeReport, is_ours: bool, our_allocator: bool = False) -> Result | None:
    """The fastest of ours, or of the peers with or without our allocator, with one process."""
    wanted = 1, is_ours, our_allocator, False
    found = []
    for result in report.played:
        c = result.contender
        if (c.processes, c.is_ours, c.our_allocator, c.fused) == wanted:
            found.append(result)
    return max(found, key=lambda result: compare(report, result, report.baseline), default=None)


def closing_line(report: SizeReport) -> str:
    """Our fastest mode against the fastest peer, as its users run it and with our allocator."""
    ours = fastest(report, is_ours=True)
    peer = fastest(report, is_ours=False)
    same = fastest(report, is_ours=False, our_allocator=True)
    line = f"{report.size}, ours / fastest peer: "
    if not ours or not (peer or same):
        return line + "n/a, one of the two was not measured"
    line += f"{compare(report, ours, peer):.2f} ({ours.name} / {peer.name})" if peer else "n/a"
    if same:
        line += f", same allocator {compare(report, ours, same):.2f} ({same.name})"
    return line


def size_table(report: SizeReport) -> str:
    """The Markdown section of one size."""
    missing = [f"- {name}: {reason}" for name, reason in report.missing.items()]
    if not report.played:
        return "\n".join([f"### {report.size}\n\nNothing could be measured:\n", *missing])
    work, n_parameters = report.work, report.work.counts[0]
    parts = [
        f"### {report.size}: {n_parameters / 1e6:.2f} million parameters",
        f"dim {work.dim}, {work.n_layers} layers, {work.n_heads} heads, {work.n_kv_heads} kv "
        f"heads; {work.batch_size} × {work.seq_len} tokens × {work.accumulation_steps} "
        f"accumulation per process and step; {work.dtype}.",
        _peak_line(report),
        table([_row(report, result) for result in report.played]),
    ]
    if not report.finished:
        parts.append(f"STOPPED in round {report.rounds}, before the end.")
    if missing:
        parts += ["Not measured:", "\n".join(missing)]
    return "\n\n".join([*parts, f"**{closing_line(report)}**\n"])


def _peak_line(report: SizeReport) -> str:
    flops = [value for value, _ in report.matrix_products]
    line = (
        f"Matrix products alone reach {_tera(report.measured_peak)} TFLOP/s here in this precision "
        f"({_tera(min(flops))} to {_tera(max(flops))}; fastest at the start: "
        f"{report.matrix_products[0][1]})."
    )
    if report.sheet_peak:
        line += f" The data sheet says {_tera(report.sheet_peak)} TFLOP/s: MFU is the share of it."
    return line


def _row(report: SizeReport, result: Result) -> dict:
    flops = statistics.median(result.speeds()) * report.work.counts[1]  # per second
    devices = result.contender.processes if report.gpu else 1
    peak = (report.sheet_peak or report.measured_peak) * devices
    against = spread(ratios(result, report.baseline), ".3f")
    return {
        "contender": result.name,
        "processes": result.contender.processes,
        "tokens/s": spread(result.speeds(), ",.0f"),
        f"against {report.baseline.name}": "1" if result is report.baseline else against,
        "TFLOP/s": _tera(flops),
        "MFU" if report.sheet_peak else "of measured peak": f"{flops / peak:.1%}",
        "memory, GiB": f"{result.peak_bytes / GIB:.2f}",
        "first step, s": f"{result.first_step_seconds:.1f}",
    }


def _tera(flops: float) -> str:
    return f"{flops / 1e12:.3g}"
