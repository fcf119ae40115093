"""From seconds per step to ratios and tables."""

import statistics
from dataclasses import dataclass, field

import torch

from benchmarks.cli import spread, table
from benchmarks.contenders import ALLOCATOR, Contender
from benchmarks.work import Work
from training.engine.device import peak_flops
from training.engine.estimate import GIB

NOTE = (
    "Medians over rounds, a round counting with the median of its steps; in brackets the lowest "
    "and the highest round. Each contender takes turns with the first; ratios are taken within a "
    "round. Model FLOPs are 6·N + 12·n_layers·n_heads·head_dim·seq_len per token. Memory is the "
    "peak per process, and the first step counts from its start."
)


@dataclass
class Result:
    """What was measured of one contender."""

    contender: Contender
    work: Work
    first_step_seconds: float  # from the start of the process
    peak_bytes: int = 0  # of one process, the largest
    step_seconds: dict[int, float] = field(default_factory=dict)  # round → median of its steps

    def speeds(self) -> list[float]:
        """Return the tokens per second of all processes together in each round."""
        tokens = self.work.tokens * self.contender.processes
        return [tokens / seconds for seconds in self.step_seconds.values()]

    def ratios(self, other: "Result") -> list[float]:
        """Return how many times as fast this one is as the other, in each round of both."""
        ours, theirs = (
            dict(zip(each.step_seconds, each.speeds(), strict=True)) for each in (self, other)
        )
        return [ours[number] / theirs[number] for number in ours.keys() & theirs.keys()]


@dataclass
class SizeReport:
    """What has been measured of one model size until now."""

    size: str
    work: Work
    results: list[Result] = field(default_factory=list)  # as they were started, the baseline first
    missing: dict[str, str] = field(default_factory=dict)  # name → reason, one line
    matrix_products: list[float] = field(default_factory=list)  # FLOP/s
    rounds: int = 0  # begun
    finished: bool = False

    def result(self, contender: Contender) -> Result:
        return next(each for each in self.results if each.contender == contender)


def size_table(report: SizeReport) -> str:
    """Return the Markdown section of one size."""
    missing = [f"- {name}: {reason}" for name, reason in report.missing.items()]
    played = [result for result in report.results if result.step_seconds]
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
    """Compare our fastest mode with the fastest peer, as its users run it and with our allocator,
    both by their ratios to the baseline."""

    def fastest(is_ours: bool, variant: str = "") -> tuple[float, str] | None:
        wanted = 1, is_ours, variant
        found = []
        for result in played:
            who = result.contender
            if (who.processes, who.is_ours, who.variant) == wanted:
                found.append((statistics.median(result.ratios(played[0])), who.name))
        return max(found, default=None)

    ours, peer, same = fastest(True), fastest(False), fastest(False, ALLOCATOR)
    line = f"{size}, ours / fastest peer: "
    if not ours or not (peer or same):
        return line + "n/a, one of the two was not measured"
    line += f"{ours[0] / peer[0]:.2f} ({ours[1]} / {peer[1]})" if peer else "n/a"
    return line + (f", same allocator {ours[0] / same[0]:.2f} ({same[1]})" if same else "")
