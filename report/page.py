"""report.html: what one run has done, or several laid over each other, in one file to keep.

The page works from the disk and without a script; report/template.html holds its looks.
"""

import json
import re
import shlex
import statistics
from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path

from common.errors import UsageError
from report.charts import Chart, Curve, draw, show, thin
from report.history import History, number, read_history, series
from runs.folder import RunFolder

TEMPLATE = Path(__file__).with_name("template.html")
SAMPLES = 20  # of a run at most
LARGE = (11.4, 3.4)  # the size of the first chart, in inches
UNKNOWN = "–"

LOSS = Chart("Training loss", "nats per token", "train", "loss", from_zero=False)
VAL_LOSS = replace(LOSS, title="Validation loss", rows="validation", key="val_loss")
OTHERS = (
    Chart("Hard loss", "against the data, nats per token", "train", "hard_loss", from_zero=False),
    Chart("Soft loss", "against the teacher, nats per token", "train", "soft_loss"),
    Chart("Agreement", "% of first choices that are the teacher’s", "train", "agreement", 100),
    Chart("Learning rate", "of AdamW", "train", "learning_rate"),
    Chart("Gradient norm", "before clipping", "train", "grad_norm"),
    Chart("Throughput", "tokens per second", "train", "tokens_per_second"),
    Chart("MFU", "% of the devices’ peak", "train", "mfu", factor=100),
    Chart("Memory", "GiB, peak of a process so far", "train", "memory_gib"),
)


def write_report(runs: list[Path], out: Path) -> None:
    """Read the runs as they are now and write the page.

    Raises UsageError: one is no run folder, or has logged nothing yet. OSError: the page cannot be
    written.
    """
    html = page([read_history(path) for path in runs])
    out.parent.mkdir(parents=True, exist_ok=True)
    # Half a surrogate pair in somebody's text cannot be encoded: a question mark stands for it.
    out.write_text(html, encoding="utf-8", errors="replace")


def leave_report(run: RunFolder) -> str:
    """Write the report of a run that ends; return its path, or why there is none, for a page that
    cannot be drawn must not hide how the run has ended."""
    try:
        write_report([run.path], run.report)
    except (UsageError, OSError, ValueError, ArithmeticError) as error:
        return f"NOT WRITTEN: {error}"
    return str(run.report)


def page(histories: list[History]) -> str:
    """Return the HTML of one run's report, or of several runs together."""
    runs = by_name(histories)
    numbers = {name: final_numbers(run) for name, run in runs.items()}
    (first, run), *others = runs.items()
    samples = "\n".join(_samples(name, run, not others) for name, run in runs.items())
    parts = {
        "title": escape(", ".join(runs)),
        "heading": f"{len(runs)} runs" if others else escape(first),
        "numbers": _table(numbers) if others else _pairs(numbers[first], "numbers"),
        "charts": "\n".join(draw(chart) for chart in charts(runs)),
        "samples": f"<h2>What the model writes</h2>\n{samples}" if samples.strip() else "",
        "settings": _differences(runs) if others else _settings(run.settings),
    }
    # In one pass: a sample that looks like a placeholder stays as it is.
    return re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], TEMPLATE.read_text(encoding="utf-8"))


def by_name(runs: list[History]) -> dict[str, History]:
    """Return the runs by their folders' names, or by their paths where two have the same name."""
    paths = {run.folder.path.resolve(): run for run in runs}
    names = {path.name: run for path, run in paths.items()}
    return names if len(names) == len(paths) else {str(path): run for path, run in paths.items()}


def charts(runs: dict[str, History]) -> list[Chart]:
    """Return every chart that there are numbers for; the first is the largest."""
    drawn = [replace(chart, curves=curves_of(chart, runs)) for chart in (LOSS, VAL_LOSS, *OTHERS)]
    if len(runs) == 1:  # both losses in one chart
        both = zip(("training", "validation"), drawn[:2], strict=True)
        losses = [
            replace(curve, label=label, color=color)
            for color, (label, chart) in enumerate(both)
            for curve in chart.curves
        ]
        drawn[:2] = [replace(LOSS, title="Loss", curves=losses)]
    for name, run in runs.items():
        phases = []
        for color, phase in enumerate(run.phases):
            points = [(row["step"], number(row.get(f"{phase}_seconds"))) for row in run.profile]
            phases.append(Curve(phase, points, color, run.tokens_per_step))
        title = "Time of profiled steps" if len(runs) == 1 else f"Profiled steps of {name}"
        drawn.append(Chart(title, "seconds", curves=phases))
    known = [chart for chart in drawn if chart.curves and all(c.values for c in chart.curves)]
    return [replace(chart, size=LARGE) for chart in known[:1]] + known[1:]


def curves_of(chart: Chart, runs: dict[str, History]) -> list[Curve]:
    """Return a curve for each run that has numbers for this chart."""
    curves = []
    for color, (name, run) in enumerate(runs.items()):
        points = [
            (step, None if value is None else value * chart.factor)
            for step, value in series(getattr(run, chart.rows), chart.key)
        ]
        label = name if len(runs) > 1 else chart.title
        curve = Curve(label, points, color, run.tokens_per_step)
        curves += [curve] if curve.values else []
    return curves


def final_numbers(run: History) -> dict[str, str]:
    """Return how a run ended, or how far it is, by name; what is not known is left out."""
    last = run.train[-1] if run.train else {}
    validation = run.validation[-1] if run.validation else {}
    losses = {row["step"]: loss for row in run.validation if (loss := number(row["val_loss"]))}
    best = min(losses, key=losses.get, default=None)
    best = None if best == validation.get("step") else best
    numbers = {
        "state": "finished" if run.folder.weights.exists() else "not finished",
        "steps": f"{run.last_step:,}",
        "tokens": _text(last.get("tokens")),
        "epochs": _text(last.get("epoch")),
        "training time": _duration(run),
        "training loss": _text(last.get("loss"), ".4f"),
        "validation loss": _text(validation.get("val_loss"), ".4f"),
        "best validation loss": best and f"{losses[best]:.4f} at step {best:,}",
        "agreement with the teacher": _text(last.get("agreement"), ".1%"),
        "perplexity": _text(validation.get("val_perplexity")),
        "bits per byte": _text(validation.get("val_bits_per_byte"), ".4f"),
        "tokens per second": _over_run(statistics.median, run, "tokens_per_second", ",.0f"),
        "MFU": _over_run(statistics.median, run, "mfu", ".1%"),
        "peak memory": _over_run(max, run, "memory_gib", ".2f", " GiB"),  # of all starts
        "skipped steps": _text(last.get("skipped_steps") or None),
    }
    return {name: text for name, text in numbers.items() if text is not None}


def _text(value, form: str | None = None, unit: str = "") -> str | None:
    if number(value) is None:
        return None
    return (show(value) if form is None else format(value, form)) + unit


def _over_run(of_all: Callable, run: History, key: str, form: str, unit: str = "") -> str | None:
    """Return one number for all rows of training, by a function of the list of their values."""
    values = [value for _, value in series(run.train, key) if value is not None]
    return _text(of_all(values), form, unit) if values else None


def _duration(run: History) -> str | None:
    """Return the time of the steps, without validation, checkpoints and the start."""
    seconds = 0.0
    before = 0
    for row in run.train:
        seconds += (number(row.get("step_seconds")) or 0.0) * (row["step"] - before)
        before = row["step"]
    hours, rest = divmod(round(seconds), 3600)
    clock = f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
    return clock if round(seconds) else None


def _table(rows: dict[str, dict[str, str]]) -> str:
    """Return a table of {run: {name: value}} with a column per run."""
    names = dict.fromkeys(name for values in rows.values() for name in values)
    head = "".join(f"<th>{escape(run)}</th>" for run in rows)
    lines = []
    for name in names:
        cells = (f"<td>{escape(values.get(name, UNKNOWN))}</td>" for values in rows.values())
        lines.append(f"<tr><th>{escape(name)}</th>{''.join(cells)}</tr>")
    return (
        f'<div class="wide"><table><thead><tr><td></td>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _pairs(values: dict[str, str], css: str) -> str:
    """Return a list of names and values."""
    items = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in values.items()
    )
    return f'<dl class="{css}">{"".join(items)}</dl>'


def _samples(name: str, run: History, single: bool) -> str:
    """Return samples through training and at the end; of several runs the last one of each."""
    samples = [
        (f"step {row['step']:,}", str(row.get("prompt", "")), str(row["text"]))
        for row in run.samples
    ]
    shown = thin(samples, SAMPLES)
    heading = ""
    if single and len(samples) > SAMPLES:
        heading = f"<p>{SAMPLES} of {len(samples):,}; all are in {run.folder.samples.name}.</p>\n"
    if run.folder.weights.exists() and run.folder.sample.exists():
        text = run.folder.sample.read_text(encoding="utf-8", errors="replace")
        shown = [*shown, ("finished model", "", text)]
    if not single:
        shown = [(f"{name}, {title}", *rest) for title, *rest in shown[-1:]]
    return heading + "\n".join(
        f"<article><h3>{escape(title)}</h3>"
        f"<pre><mark>{escape(prompt)}</mark>{escape(text)}</pre></article>"
        for title, prompt, text in shown
    )


def _settings(settings: dict) -> str:
    """Return everything in settings.json."""
    if not settings:
        return "<h2>Settings</h2>\n<p>settings.json is missing or cannot be read.</p>"
    parts = ["<h2>Settings</h2>", f"<pre>{escape(_command(settings))}</pre>"]
    for group, values in _groups(settings).items():
        parts += [f"<h3>{escape(group)}</h3>", _pairs(values, "settings")]
    if settings.get("deepspeed"):
        config = json.dumps(settings["deepspeed"], indent=2)
        parts.append(f"<h3>DeepSpeed</h3>\n<pre>{escape(config)}</pre>")
    return "\n".join(parts)


def _command(settings: dict) -> str:
    words = settings.get("command")
    return shlex.join(map(str, words)) if isinstance(words, list) else UNKNOWN


def _groups(settings: dict) -> dict[str, dict[str, str]]:
    """Return settings.json as {heading: {name: value}}, without command and DeepSpeed's file."""
    titles = {"arguments": "Flags", "model": "Model", "packages": "Versions"}
    groups = {"Engine": {}}
    for key, value in settings.items():
        if isinstance(value, dict) and key in titles:
            groups[titles[key]] = {name: _plain(v) for name, v in value.items()}
        elif key not in ("command", "deepspeed"):
            groups["Engine"][key] = _plain(value)
    return groups


def _plain(value) -> str:
    return UNKNOWN if value is None else value if isinstance(value, str) else json.dumps(value)


def _differences(runs: dict[str, History]) -> str:
    """Return the settings in which the runs are not alike, and the command of each."""
    flat = {}
    for name, run in runs.items():
        if run.settings:
            groups = _groups(run.settings).values()
            flat[name] = {key: value for group in groups for key, value in group.items()}
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    keys.pop("run_name", None)  # stands above its column
    different = [k for k in keys if len({v.get(k, UNKNOWN) for v in flat.values()}) > 1]
    table = _table({n: {k: v.get(k, UNKNOWN) for k in different} for n, v in flat.items()})
    commands = "\n".join(
        f"<h3>{escape(name)}</h3>\n<pre>{escape(_command(run.settings))}</pre>"
        for name, run in runs.items()
    )
    alike = "<p>The runs have the same settings.</p>"
    return f"<h2>Settings that differ</h2>\n{table if different else alike}\n{commands}"
