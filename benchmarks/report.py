"""From seconds per step to ratios and tables."""

import statistics
from dataclasses import asdict, dataclass, field

from benchmarks.contenders import Contender
from benchmarks.work import Work
from training.engine.memory import GIB

NOTE = (
    "Every contender has its own process and takes its turn in every round. Figures are medians "
    "over rounds, a round counting with the median of its steps; in brackets the lowest and the "
    "highest round. Ratios are taken within a round, where contenders meet the same conditions, "
    "and then the median. Model FLOPs are 6·N + 12·n_layers·n_heads·head_dim·seq_len per token for "
    "everybody. Memory is the peak per process, {memory}. The first step counts from the start of "
    "the process: imports, {compilation}building the model, and the step."
)


@dataclass
class Result:
    """What was measured of one contender."""

    contender: Contender
    tokens_per_step: int  # of all its processes together
    first_step_seconds: float = 0.0  # from the start of the process
    threads: int = 0
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
    measured_peaks: list[float]  # FLOP/s of matrix products: start, each round, end
    peak_shape: str  # the size that was fastest at the start
    sheet_peak: float | None  # FLOP/s that a GPU's data sheet states for this precision
    devices_shared: bool  # whether all processes share one device, the CPU
    stopped_after: int | None = None  # the round that was interrupted, if one was

    @property
    def measured_peak(self) -> float:
        return statistics.median(self.measured_peaks)

    def by_name(self, name: str) -> Result:
        return next(result for result in self.results if result.name == name)


def ratio(a: Result, b: Result) -> tuple[float, float, float] | None:
    """How many times as fast a is as b: median, lowest, highest over the rounds both were in."""
    shared = a.step_seconds.keys() & b.step_seconds.keys()
    if not shared:
        return None
    tokens = a.tokens_per_step / b.tokens_per_step
    ratios = [tokens * b.step_seconds[i] / a.step_seconds[i] for i in shared]
    return statistics.median(ratios), min(ratios), max(ratios)


def compare(report: SizeReport, a: Result, b: Result) -> float:
    """`ratio`'s median; of contenders that never met, by way of the baseline that met both.

    If the baseline failed on the way and its successor has not met them, median speeds must do.
    """
    if met := ratio(a, b):
        return met[0]
    baseline = report.by_name(report.baseline)
    first, second = ratio(a, baseline), ratio(baseline, b)
    if first and second:
        return first[0] * second[0]
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


def closing(report: SizeReport) -> dict:
    """Our fastest mode against the fastest peer, as its users run it and with our allocator.

    Returns:
        {"as_users_run_it": X, "same_allocator": Y}, each None or {"ratio", "ours", "peer"}.
    """
    ours = fastest(report, is_ours=True)
    found = {}
    for key, allocator in (("as_users_run_it", "default"), ("same_allocator", "ours")):
        peer = fastest(report, is_ours=False, allocator=allocator)
        found[key] = None
        if ours and peer:
            times = compare(report, ours, peer)
            found[key] = {"ratio": times, "ours": ours.name, "peer": peer.name}
    return found


def closing_line(report: SizeReport) -> str:
    """`closing` for people, e.g. "26m, ours / fastest peer: 1.62 (…), same allocator 1.51 (…)"."""
    ends = closing(report)
    users, same = ends["as_users_run_it"], ends["same_allocator"]
    if not (users or same):
        return f"{report.size}, ours / fastest peer: n/a, one of the two was not measured"
    line = f"{report.size}, ours / fastest peer: "
    line += f"{users['ratio']:.2f} ({users['ours']} / {users['peer']})" if users else "n/a"
    return line + (f", same allocator {same['ratio']:.2f} ({same['peer']})" if same else "")


def size_table(report: SizeReport) -> str:
    """The Markdown section of one size."""
    work, n = report.work, report.work.counts[0]
    if not report.results:
        return "\n".join(
            [f"### {report.size}", "", "Nothing could be measured:", "", *missing(report)]
        )
    lines = [
        f"### {report.size}: {n / 1e6:.2f} million parameters",
        "",
        f"dim {work.dim}, {work.n_layers} layers, {work.n_heads} heads, {work.n_kv_heads} kv "
        f"heads; {work.batch_size} × {work.seq_len} tokens × {work.accumulation_steps} "
        f"accumulation per process and step; {work.dtype}.",
        "",
        _peak_line(report),
        "",
        *_rows(report),
        "",
    ]
    threads = {r.name: r.threads for r in report.results if r.contender.processes == 1}
    if len(set(threads.values())) > 1:
        told = ", ".join(f"{name} {number}" for name, number in threads.items())
        lines += [f"NOT ALIKE: threads of {told}.", ""]
    if shares := communication(report):
        told = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        lines += [f"Of a step, exchange between processes takes: {told}.", ""]
    if report.stopped_after is not None:
        lines += [f"STOPPED in round {report.stopped_after}, before the end.", ""]
    if report.missing:
        lines += ["Not measured:", "", *missing(report), ""]
    return "\n".join([*lines, f"**{closing_line(report)}**", ""])


def communication(report: SizeReport) -> dict[str, float]:
    """What engines lose to processes that train each for themselves, as shares of their time.

    That is the exchange of gradients and weights, as far as it is not hidden behind the backward
    pass, and all else that the engine adds.
    """
    alone = {r.contender.compiled: r for r in report.results if r.contender.engine == "alone"}
    found = {}
    for result in report.results:
        other = alone.get(result.contender.compiled)
        if other and result is not other and result.contender.processes > 1:
            found[result.name] = 1 - compare(report, result, other)
    return found


def missing(report: SizeReport) -> list[str]:
    return [f"- {name}: {reason}" for name, reason in report.missing.items()]


def _peak_line(report: SizeReport) -> str:
    low, high = min(report.measured_peaks), max(report.measured_peaks)
    line = (
        f"Matrix products alone reach {_tera(report.measured_peak)} TFLOP/s here in this precision "
        f"({_tera(low)} to {_tera(high)}; fastest at the start: {report.peak_shape})."
    )
    if report.sheet_peak:
        line += f" The data sheet says {_tera(report.sheet_peak)} TFLOP/s: MFU is the share of it."
    return line


def _rows(report: SizeReport) -> list[str]:
    share = "MFU" if report.sheet_peak else "of measured peak"
    head = ["contender", "processes", "tokens/s", f"against {report.baseline}"]
    head += ["TFLOP/s", share, "memory, GiB", "first step, s"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for result in report.results:
        values = figures(report, result)
        times = "n/a"
        if values["ratio"]:
            times = "{:.3f} ({:.3f} to {:.3f})".format(*values["ratio"])
        speeds = result.speeds()
        cells = [
            result.name,
            str(result.contender.processes),
            f"{values['tokens_per_second']:,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})",
            "1" if result.name == report.baseline else times,
            _tera(values["flops"]),
            f"{values['share_of_peak']:.1%}",
            f"{result.peak_bytes / GIB:.2f}",
            f"{result.first_step_seconds:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def figures(report: SizeReport, result: Result) -> dict:
    """What the table says of a contender, as numbers; rates are per second."""
    speed = statistics.median(result.speeds())
    devices = 1 if report.devices_shared else result.contender.processes
    flops = speed * report.work.counts[1]
    peak = (report.sheet_peak or report.measured_peak) * devices
    return {
        "tokens_per_second": speed,
        "ratio": ratio(result, report.by_name(report.baseline)),
        "flops": flops,
        "share_of_peak": flops / peak,
    }


def size_json(report: SizeReport) -> dict:
    """Everything measured of one size, every round included."""
    return {
        "size": report.size,
        "work": {name: getattr(report.work, name) for name in Work.__dataclass_fields__},
        "parameters": report.work.counts[0],
        "flops_per_token": report.work.counts[1],
        "baseline": report.baseline,
        "matrix_product_flops": report.measured_peaks,
        "data_sheet_flops": report.sheet_peak,
        "results": [
            asdict(result) | {"name": result.name, **figures(report, result)}
            for result in report.results
        ],
        "communication": communication(report),
        "not_measured": report.missing,
        "stopped_after": report.stopped_after,
        "ours_against_fastest_peer": closing(report),
    }


def _tera(flops: float) -> str:
    return f"{flops / 1e12:.3g}"
