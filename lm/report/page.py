"""Write report.html, one file without JavaScript that a browser opens from the disk.

The page shows final numbers, charts, samples and settings of one or several runs.
"""

import json
import re
import shlex
import statistics
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from html import escape
from pathlib import Path

import numpy as np

from lm.common.errors import one_line
from lm.data.order import spread
from lm.report.drawing import Chart, Curve, draw, plot
from lm.report.history import History, read_history

TEMPLATE = Path(__file__).with_name("template.html")
SAMPLES = 10  # maximum of samples from training per run; the finished model adds one

LOSS = Chart("Training loss", "nats per token", "loss", from_zero=False, size=(11.4, 3.4))
VAL_LOSS = Chart("Validation loss", LOSS.unit, "val_loss", from_zero=False)
OTHERS = (
    Chart("Hard loss", "against the data, nats per token", "hard_loss", from_zero=False),
    Chart("Soft loss", "against the teacher, nats per token", "soft_loss"),
    Chart("Agreement", "share of tokens where both models have the same first choice", "agreement"),
    Chart("Learning rate", "of AdamW", "learning_rate"),
    Chart("Gradient norm", "before clipping", "grad_norm"),
    Chart("Throughput", "tokens per second", "tokens_per_second"),
    Chart("MFU", "share of the devices’ peak FLOP/s", "mfu"),
    Chart("Memory", "GiB, peak of the main process so far", "memory_gib"),
)


def write_report(runs: list[Path], out: Path) -> None:
    """Write the page of these runs to `out`. Raises UsageError if a run is missing or empty."""
    histories = by_name(runs)
    parts = {
        "title": escape(", ".join(histories)),
        "numbers": _table({name: final_numbers(run) for name, run in histories.items()}),
        "charts": "\n".join(draw(chart) for chart in charts(histories)),
        "samples": "\n".join(_samples(name, run) for name, run in histories.items()),
        "settings": _settings(histories),
    }
    # All placeholders are replaced at once, so that {{...}} in a sample is not replaced.
    html = re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], TEMPLATE.read_text("utf-8"))
    out.parent.mkdir(parents=True, exist_ok=True)
    # UTF-8 cannot encode half a surrogate pair in a sample: write a question mark instead.
    out.write_text(html, encoding="utf-8", errors="replace")


def try_to(write: Callable[[list[Path], Path], None], runs: list[Path], out: Path) -> str:
    """Write a page or a picture of the runs; return its path, or why it could not be written."""
    try:
        write(runs, out)
    except Exception as error:  # of matplotlib, for example
        return f"NOT WRITTEN: {one_line(error)}"
    return str(out)


def draw_losses(runs: list[Path], picture: Path) -> None:
    """Draw the training and validation loss of one run into a picture, such as a PNG."""
    (chart,) = losses(by_name(runs))
    figure = plot(replace(chart, size=(8, 4.5)))
    figure.axes[0].set_ylabel(LOSS.unit)
    figure.legend()
    figure.savefig(picture, dpi=120)


def by_name(runs: list[Path]) -> dict[str, History]:
    """Read the runs; return them by folder name, or by path if two names are equal."""
    paths = {path.resolve(): read_history(path) for path in runs}
    names = {path.name: run for path, run in paths.items()}
    return names if len(names) == len(paths) else {str(path): run for path, run in paths.items()}


def charts(runs: dict[str, History]) -> list[Chart]:
    """Return the charts that have numbers. The CSS makes the first chart as wide as the page."""
    found = [*losses(runs), *(with_curves(chart, runs) for chart in OTHERS)]
    return [chart for chart in found if chart.lines()]


def losses(runs: dict[str, History]) -> list[Chart]:
    """Return one chart of training and validation loss; for several runs, a chart of each loss."""
    if len(runs) > 1:
        return [with_curves(LOSS, runs), with_curves(VAL_LOSS, runs)]
    (run,) = runs.values()
    train, validation = {"training": run}, {"validation": run}
    curves = with_curves(LOSS, train).curves + with_curves(VAL_LOSS, validation).curves
    return [replace(LOSS, title="Loss", curves=curves)]


def with_curves(chart: Chart, runs: dict[str, History]) -> Chart:
    """Return the chart with a curve for each run, which may have no values."""
    curves = []
    for name, run in runs.items():
        label = name + (run.training_loss_is if chart.key == LOSS.key else "")
        rows = [row for row in run.train + run.validation if chart.key in row]
        points = [(row["step"], row[chart.key]) for row in rows]
        curves.append(Curve(label, points, run.tokens_per_step))
    return replace(chart, curves=tuple(curves))


def final_numbers(run: History) -> dict[str, str]:
    """Return the summary of a run as name → text. Unknown numbers are left out."""

    def median(key: str) -> float | None:
        values = [row[key] for row in run.train if row.get(key) is not None]
        return statistics.median(values) if values else None

    last, validation = (rows[-1] if rows else {} for rows in (run.train, run.validation))
    losses = [(row["val_loss"], row["step"]) for row in run.validation]
    best = min((each for each in losses if each[0] is not None), default=None)
    # "step_seconds" is a mean since the previous row. It may leave out a resumed run's first step.
    n_steps = np.diff([0, *(row["step"] for row in run.train)])
    seconds = [row.get("step_seconds") or 0.0 for row in run.train]
    numbers = {  # name: (value, format)
        "state": ("finished" if run.folder.weights.exists() else "not finished", ""),
        "steps": (max(last.get("step", 0), validation.get("step", 0)), ","),
        "tokens": (last.get("tokens"), ",.0f"),
        "epochs": (last.get("epoch"), ".4g"),
        "training time": (timedelta(seconds=round(n_steps @ seconds)), ""),
        "training loss": (last.get("loss"), ".4f"),
        "validation loss": (validation.get("val_loss"), ".4f"),
        "best validation loss": (best and f"{best[0]:.4f} at step {best[1]:,}", ""),
        "agreement with the teacher": (last.get("agreement"), ".1%"),
        "perplexity": (validation.get("val_perplexity"), ".4g"),
        "bits per byte": (validation.get("val_bits_per_byte"), ".4f"),
        "with gzip -9": (validation.get("val_gzip"), ".2f"),
        "with xz -9": (validation.get("val_xz"), ".2f"),
        "of an untrained model": (validation.get("val_untrained"), ".2f"),
        "tokens per second": (median("tokens_per_second"), ",.0f"),
        "MFU": (median("mfu"), ".1%"),
        "peak memory in GiB": (last.get("memory_gib"), ".2f"),
        "skipped steps": (last.get("skipped_steps"), ",.0f"),
    }
    return {name: format(x, form) for name, (x, form) in numbers.items() if x is not None}


def _table(rows: dict[str, dict[str, str]]) -> str:
    """Return {run: {name: value}} as an HTML table with a column per run."""
    head = "".join(f"<th>{escape(run)}</th>" for run in rows)
    body = ""
    for name in dict.fromkeys(name for values in rows.values() for name in values):
        cells = (f"<td>{escape(values.get(name, '–'))}</td>" for values in rows.values())
        body += f"<tr><th>{escape(name)}</th>{''.join(cells)}</tr>"
    head = f"<thead><tr><td></td>{head}</tr></thead>"
    style = "one" if len(rows) == 1 else "wide"
    return f'<div class="{style}"><table>{head}<tbody>{body}</tbody></table></div>'


def _samples(name: str, run: History) -> str:
    """Return HTML of evenly spaced samples from training and of the final sample."""
    rows = [run.samples[i] for i in spread(len(run.samples), SAMPLES)]
    shown = [(f"step {row['step']:,}", row.get("prompt", ""), row["text"]) for row in rows]
    if run.folder.weights.exists() and run.folder.sample.exists():
        text = run.folder.sample.read_text(encoding="utf-8", errors="replace")
        shown.append(("finished model", "", text))
    return "\n".join(
        f"<article><h3>{escape(name)}, {when}</h3>"
        f"<pre><mark>{escape(prompt)}</mark>{escape(text)}</pre></article>"
        for when, prompt, text in shown
    )


def _settings(runs: dict[str, History]) -> str:
    """Return HTML of commands and settings; for several runs, only settings that differ."""
    parts = ["<h2>Settings that differ</h2>" if len(runs) > 1 else "<h2>Settings</h2>"]
    table = {}
    for name, run in runs.items():
        command = shlex.join(run.settings.get("command", []))
        parts.append(f"<h3>{escape(name)}</h3>\n<pre>{escape(command)}</pre>")
        table[name] = _flat(run.settings)
    if len(runs) > 1:
        shared = set.intersection(*(set(values.items()) for values in table.values()))
        for name, values in table.items():
            table[name] = dict(item for item in values.items() if item not in shared)
    return "\n".join([*parts, _table(table)])


def _flat(settings: dict) -> dict[str, str]:
    """Flatten settings.json to name → text, but keep "deepspeed" as one text. Drop "command"."""
    flat = {}
    for key, value in settings.items():
        if isinstance(value, dict) and key != "deepspeed":  # a group of settings
            flat |= _flat(value)
        elif key != "command":
            flat[key] = value if isinstance(value, str) else json.dumps(value)
    return flat
