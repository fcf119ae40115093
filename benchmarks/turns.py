"""Measurements of contenders: the class `Turn`, files of JSON lines, and a table of medians.

This file does not import torch, so benchmarks/gpu.py can read measurements even if torch hangs.
"""

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cli import spread
from lm.common.numbers import memory

NOTE = (
    "Speeds are medians over turns; in brackets are the lowest and the highest turn. The speed of "
    "a turn is the median of its steps, on a GPU their mean. Each contender takes turns with the "
    "first one; a ratio compares two speeds of one round. For N parameters, model FLOPs are 6·N + "
    '12·n_layers·n_heads·head_dim·seq_len per token. "Of products" is FLOP/s divided by the FLOP/s '
    "of matrix products alone. Memory is the peak per process; on a CPU it includes libraries, but "
    "the expected memory does not. The first step is timed from the start of the process."
)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The measurements of one turn of a contender. Speeds are sums over its processes."""

    size: str  # a key of benchmarks.work.SIZES
    accumulation_steps: int
    contender: str
    processes: int
    round: int  # contenders with turns in the same round can be compared
    tokens_per_second: float
    flops_per_second: float  # model FLOPs
    peak_flops: float | None  # FLOP/s of the GPUs by their data sheet; None: unknown
    product_flops: float  # measured FLOP/s of matrix products
    peak_bytes: int  # largest peak memory of a process so far
    expected_bytes: int | None  # estimate without libraries; None for other projects
    first_step_seconds: float  # from the start of the process


def record(path: Path | None, kind: str, row: dict) -> None:
    """Append a row to a file of JSON lines, if a file is given."""
    if path is not None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind} | row) + "\n")


def read_rows(path: Path) -> list[tuple[str, dict]]:
    """Return (kind, row) for each row of a file, without a last line that is not finished."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(row.pop("kind"), row) for row in rows]


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
                "processes": last.processes,
                "tokens/s": spread(list(speeds.values()), ",.0f"),
                "ratio": "1" if own is baseline else spread(ratios, ".3f") if ratios else "n/a",
                "TFLOP/s": f"{flops / 1e12:.3g}",
                "MFU": f"{flops / last.peak_flops:.1%}" if known else "n/a",
                "of products": f"{flops / last.product_flops:.1%}",
                "memory": memory(last.peak_bytes),
                "expected": memory(last.expected_bytes) if last.expected_bytes else "n/a",
                "first step, s": f"{last.first_step_seconds:.1f}",
            }
        )
    return rows
