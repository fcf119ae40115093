"""report.html: what runs have done, in one file that works from the disk and without a script."""

import json
import re
import shlex
import statistics
from dataclasses import replace
from datetime import timedelta
from html import escape
from math import nan
from pathlib import Path

import numpy as np

from report.charts import Chart, Curve, draw, plot
from report.history import History, number, read_history, series

TEMPLATE = Path(__file__).with_name("template.html")
SAMPLES = 10  # of a run, besides that of the finished model
LARGE = (11.4, 3.4)  # the size of the first chart, in inches
UNKNOWN = "–"

LOSS = Chart("Training loss", "nats per token", "loss", from_zero=False)
VAL_LOSS = replace(LOSS, title="Validation loss", key="val_loss")
OTHERS = (
    Chart("Hard loss", "against the data, nats per token", "hard_loss", from_zero=False),
    Chart("Soft loss", "against the teacher, nats per token", "soft_loss"),
    Chart("Agreement", "of first choices with the teacher", "agreement"),
    Chart("Learning rate", "of AdamW", "learning_rate"),
    Chart("Gradient norm", "before clipping", "grad_norm"),
    Chart("Throughput", "tokens per second", "tokens_per_second"),
    Chart("MFU", "of the devices’ peak", "mfu"),
    Chart("Memory", "GiB, peak of a process so far", "memory_gib"),
)


def write_report(runs: list[Path], out: Path) -> None:
    """Write the page of the runs as they are now. Raises UsageError: one has logged nothing yet."""
    histories = by_name(runs)
    parts = {
        "title": escape(", ".join(histories)),
        "numbers": _table({name: final_numbers(run) for name, run in histories.items()}),
        "charts": "\n".join(draw(chart) for chart in charts(histories)),
        "samples": "\n".join(_samples(name, run) for name, run in histories.items()),
        "settings": _settings(histories),
    }
    # In one pass: a sample that looks like a placeholder stays as it is.
    html = re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], TEMPLATE.read_text("utf-8"))
    out.parent.mkdir(parents=True, exist_ok=True)
    # Half a surrogate pair in somebody's text cannot be encoded: a question mark stands for it.
    out.write_text(html, encoding="utf-8", errors="replace")


def leave_report(runs: list[Path], out: Path) -> str:
    """Write the page of runs that end; return its path, or why there is none."""
    try:
        write_report(runs, out)
    except (OSError, ValueError, ArithmeticError) as error:
        return f"NOT WRITTEN: {error}"
    return str(out)


def draw_losses(runs: list[Path], picture: Path) -> None:
    """Draw the losses, of several runs validation alone, into a PNG or SVG file."""
    figure = plot(replace(losses(by_name(runs))[-1], size=(8, 4.5)))
    figure.axes[0].set_ylabel(LOSS.unit)
    figure.legend()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)


def by_name(runs: list[Path]) -> dict[str, History]:
    """Read the runs by their folders' names, or by their paths where two have the same name."""
    paths = {path.resolve(): read_history(path) for path in runs}
    names = {path.name: run for path, run in paths.items()}
    return names if len(names) == len(paths) else {str(path): run for path, run in paths.items()}


def charts(runs: dict[str, History]) -> list[Chart]:
    """Return every chart that there are numbers for; the first is the largest."""
    drawn = losses(runs) + [replace(chart, curves=_curves(chart, runs)) for chart in OTHERS]
    known = [chart for chart in drawn if chart.curves]
    return [replace(chart, size=LARGE) for chart in known[:1]] + known[1:]


def losses(runs: dict[str, History]) -> list[Chart]:
    """Return training and validation loss: of one run in one chart, of several in two."""
    train, validation = _curves(LOSS, runs), _curves(VAL_LOSS, runs)
    if len(runs) > 1:
        return [replace(LOSS, curves=train), replace(VAL_LOSS, curves=validation)]
    curves = [replace(curve, label="training") for curve in train]
    curves += [replace(curve, label="validation", color=1) for curve in validation]
    return [replace(LOSS, title="Loss", curves=curves)]


def _curves(chart: Chart, runs: dict[str, History]) -> list[Curve]:
    """Return a curve for each run that has numbers for this chart."""
    curves = []
    for color, (name, run) in enumerate(runs.items()):
        label = name if len(runs) > 1 else chart.title
        points = series(run.train + run.validation, chart.key)
        curves.append(Curve(label, points, color, run.tokens_per_step))
    return [curve for curve in curves if curve.values]


def final_numbers(run: History) -> dict[str, str]:
    """Return how a run ended, or how far it is, by name, as far as it is known."""

    def text(value, form: str) -> str | None:
        return None if number(value) is None else format(value, form)

    def median(key: str) -> float:
        return statistics.median([v for _, v in series(run.train, key) if v is not None] or [nan])

    last = run.train[-1] if run.train else {}
    validation = run.validation[-1] if run.validation else {}
    losses = {row["step"]: loss for row in run.validation if (loss := number(row["val_loss"]))}
    best = min(losses, key=losses.get, default=None)
    steps = np.diff([0, *(row["step"] for row in run.train)])
    each = [number(row.get("step_seconds")) or 0.0 for row in run.train]
    numbers = {
        "state": "finished" if run.folder.weights.exists() else "not finished",
        "steps": f"{max(row['step'] for row in (last, validation) if row):,}",
        "tokens": text(last.get("tokens"), ",.0f"),
        "epochs": text(last.get("epoch"), ".4g"),
        "training time": str(timedelta(seconds=round(steps @ each))),
        "training loss": text(last.get("loss"), ".4f"),
        "validation loss": text(validation.get("val_loss"), ".4f"),
        "best validation loss": None if best is None else f"{losses[best]:.4f} at step {best:,}",
        "agreement with the teacher": text(last.get("agreement"), ".1%"),
        "perplexity": text(validation.get("val_perplexity"), ".4g"),
        "bits per byte": text(validation.get("val_bits_per_byte"), ".4f"),
        "tokens per second": text(median("tokens_per_second"), ",.0f"),
        "MFU": text(median("mfu"), ".1%"),
        "peak memory in GiB": text(last.get("memory_gib"), ".2f"),
        "skipped steps": text(last.get("skipped_steps"), ",.0f"),
    }
    return {name: said for name, said in numbers.items() if said is not None}


def _table(rows: dict[str, dict[str, str]]) -> str:
    """Return {run: {name: value}} as a table with a column per run."""
    head = "".join(f"<th>{escape(run)}</th>" for run in rows)
    body = ""
    for name in dict.fromkeys(name for values in rows.values() for name in values):
        cells = (f"<td>{escape(values.get(name, UNKNOWN))}</td>" for values in rows.values())
        body += f"<tr><th>{escape(name)}</th>{''.join(cells)}</tr>"
    css, top = "one" if len(rows) == 1 else "wide", f"<thead><tr><td></td>{head}</tr></thead>"
    return f'<div class="{css}"><table>{top}<tbody>{body}</tbody></table></div>'


def _samples(name: str, run: History) -> str:
    """Return samples through training, evenly spread, and the one at the end."""
    spread = np.linspace(0, len(run.samples) - 1, SAMPLES).round().astype(int)
    rows = [run.samples[i] for i in np.unique(spread)] if run.samples else []
    shown = [(f"step {row['step']:,}", row.get("prompt", ""), row["text"]) for row in rows]
    if run.folder.weights.exists() and run.folder.sample.exists():
        text = run.folder.sample.read_text(encoding="utf-8", errors="replace")
        shown.append(("finished model", "", text))
    return "\n".join(
        f"<article><h3>{escape(name)}, {at}</h3>"
        f"<pre><mark>{escape(prompt)}</mark>{escape(text)}</pre></article>"
        for at, prompt, text in shown
    )


def _settings(runs: dict[str, History]) -> str:
    """Return each run's command, and a table of settings, of several runs those that differ."""
    commands = [
        f"<h3>{escape(name)}</h3>\n<pre>{escape(shlex.join(run.settings.get('command', [])))}</pre>"
        for name, run in runs.items()
    ]
    flat, which = {name: _flat(run.settings) for name, run in runs.items()}, ""
    if len(runs) > 1:
        keys, which = {key for values in flat.values() for key in values}, " that differ"
        same = {key for key in keys if len({values.get(key) for values in flat.values()}) == 1}
        flat = {n: {k: v for k, v in values.items() if k not in same} for n, values in flat.items()}
    return "\n".join([f"<h2>Settings{which}</h2>", *commands, _table(flat)])


def _flat(settings: dict) -> dict[str, str]:
    """Return {name: value} of settings.json, whose groups may hold more names."""
    flat = {}
    for key, value in settings.items():
        if isinstance(value, dict) and key != "deepspeed":
            flat |= _flat(value)
        elif key != "command":
            flat[key] = value if isinstance(value, str) else json.dumps(value)
    return flat
