"""From seconds per step to ratios and tables."""

import statistics
from dataclasses import dataclass, field

from benchmarks.contenders import Contender
from benchmarks.markdown import table
from benchmarks.work import Work
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
    losses: list[float] = field(default_factory=list)  # at the first step, after the last
    peak_bytes: int = 0  # of one process, the largest
    step_seconds: dict[int, float] = field(default_factory=dict)  # round → median of its steps

    @property
    def name(self) -> str:
        return self.contender.name

    def speeds(self) -> list[float]:
        """Tokens per second in each round."""
        return [self.tokens_per_step / seconds for seconds in self.step_seconds.values()]


@dataclass
class SizeReport:
    """One model size: results in the order of the table, and why others are missing."""

    size: str
    work: Work
    baseline: str  # name of the contender that the others are compared with
    results: list[Result]
    missing: dict[str, str]  # name → reason, one line
    matrix_products: list[tuple[float, str]]  # (FLOP/s, shape): at the start, each round, the end
    sheet_peak: float | None  # FLOP/s that a GPU's data sheet states for this precision
    devices_shared: bool  # whether all processes share one device, the CPU
    stopped_after: int | None = None  # the round that was interrupted, if one was

    @property
    def measured_peak(self) -> float:
        return statistics.median(flops for flops, _ in self.matrix_products)

    def by_name(self, name: str) -> Result:
        return next(result for result in self.results if result.name == name)


def ratios(a: Result, b: Result) -> list[float]:
    """How many times as fast a is as b, in each round that both were in."""
    tokens = a.tokens_per_step / b.tokens_per_step
    shared = a.step_seconds.keys() & b.step_seconds.keys()
    return [tokens * b.step_seconds[i] / a.step_seconds[i] for i in shared]


def compare(report: SizeReport, a: Result, b: Result) -> float:
    """The median of `ratios`; of contenders that never met, by way of the baseline that met both.

    If that has failed on the way, median speeds must do.
    """
    if met := ratios(a, b):
        return statistics.median(met)
    baseline = report.by_name(report.baseline)
    first, second = ratios(a, baseline), ratios(baseline, b)
    if first and second:
        return statistics.median(first) * statistics.median(second)
    return statistics.median(a.speeds()) / statistics.median(b.speeds())


def fastest(report: SizeReport, **wanted) -> Result | None:
    """The fastest contender with one process and these attributes, e.g. is_ours=False."""
    found = [
        result
        for result in report.results
        if result.contender.processes == 1
        and all(getattr(result.contender, name) == value for name, value in wanted.items())
    ]
    baseline = report.by_name(report.baseline) if found else None
    return max(found, key=lambda result: compare(report, result, baseline), default=None)


def closing_line(report: SizeReport) -> str:
    """Our fastest mode against the fastest peer, as its users run it and with our allocator."""
    ours = fastest(report, is_ours=True)
    line = f"{report.size}, ours / fastest peer: "
    peer = fastest(report, is_ours=False, our_allocator=False)
    same = fastest(report, is_ours=False, our_allocator=True)
    if not ours or not (peer or same):
        return line + "n/a, one of the two was not measured"
    line += f"{compare(report, ours, peer):.2f} ({ours.name} / {peer.name})" if peer else "n/a"
    if same:
        line += f", same allocator {compare(report, ours, same):.2f} ({same.name})"
    return line


def size_table(report: SizeReport) -> str:
    """The Markdown section of one size."""
    missing = [f"- {name}: {reason}" for name, reason in report.missing.items()]
    if not report.results:
        return "\n".join([f"### {report.size}\n\nNothing could be measured:\n", *missing])
    work, n_parameters = report.work, report.work.counts[0]
    parts = [
        f"### {report.size}: {n_parameters / 1e6:.2f} million parameters",
        f"dim {work.dim}, {work.n_layers} layers, {work.n_heads} heads, {work.n_kv_heads} kv "
        f"heads; {work.batch_size} × {work.seq_len} tokens × {work.accumulation_steps} "
        f"accumulation per process and step; {work.dtype}.",
        _peak_line(report),
        _results_table(report),
    ]
    if report.stopped_after is not None:
        parts.append(f"STOPPED in round {report.stopped_after}, before the end.")
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


def _results_table(report: SizeReport) -> str:
    share = "MFU" if report.sheet_peak else "of measured peak"
    titles = ["contender", "processes", "tokens/s", f"against {report.baseline}", "TFLOP/s", share]
    baseline = report.by_name(report.baseline)
    rows = []
    for result in report.results:
        flops = statistics.median(result.speeds()) * report.work.counts[1]  # per second
        devices = 1 if report.devices_shared else result.contender.processes
        peak = (report.sheet_peak or report.measured_peak) * devices
        rows.append(
            [
                result.name,
                result.contender.processes,
                _spread(result.speeds(), ",.0f"),
                "1" if result is baseline else _spread(ratios(result, baseline), ".3f"),
                _tera(flops),
                f"{flops / peak:.1%}",
                f"{result.peak_bytes / GIB:.2f}",
                f"{result.first_step_seconds:.1f}",
            ]
        )
    return table([*titles, "memory, GiB", "first step, s"], rows)


def _spread(values: list[float], form: str) -> str:
    """Median, lowest and highest."""
    if not values:
        return "n/a"
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{median:{form}} ({low:{form}} to {high:{form}})"


def _tera(flops: float) -> str:
    return f"{flops / 1e12:.3g}"
