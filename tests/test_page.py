"""report.html, parsed without a browser, and the picture of losses."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image
from matplotlib.axes import Axes

from lm.report.drawing import COLORS, plot, show
from lm.report.history import read_history
from lm.report.page import SAMPLES, by_name, charts, draw_losses, losses, try_to, write_report
from lm.storage.folder import RunFolder
from scripts import report as report_script

VOID = ("meta", "link", "input")
NAN = float("nan")
NASTY = '</script><script>alert(1)</script> & <b> "quoted" {{title}} 春眠\ud800\x00'


class Page(HTMLParser):
    """Collects a page's elements and visible text. Fails if an end tag is wrong or missing."""

    def __init__(self, path: Path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open, self.tags, self.text, self.attributes = [], [], [], []
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data.strip())

    @property
    def words(self) -> str:
        return " ".join(filter(None, self.text))

    @property
    def titles(self) -> list[str]:
        return re.findall("<h2>(.*?)</h2>", self.source)


def drawn(chart: str, *runs: Path) -> Axes:
    """Draw the chart with this title; return its axes."""
    (found,) = (each for each in charts(by_name(list(runs))) if each.title == chart)
    return plot(found).axes[0]


def train_row(step: int, loss: float | None = 2.5, **more) -> dict:
    row = {"step": step, "tokens": step * 1000, "epoch": step / 100, "loss": loss}
    row |= {"learning_rate": 0.001, "grad_norm": 0.5, "skipped_steps": 0, "step_seconds": 2.0}
    return row | {"tokens_per_second": 500.0, "mfu": None, "memory_gib": 1.25} | more


def write_run(folder: Path, rows: list[dict], samples=(), settings: dict | None = None) -> Path:
    folder.mkdir(parents=True)
    for name, content in (("metrics.jsonl", rows), ("samples.jsonl", samples)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in content))
    (folder / "settings.json").write_text(json.dumps(settings))
    return folder


def report(*runs: Path) -> Page:
    out = runs[0].parent / "report.html"
    write_report(list(runs), out)
    return Page(out)


def test_a_history_has_the_rows_of_training_and_validation_without_broken_lines(tmp_path):
    rows = [{"step": 1, "loss": None}, {"step": 4, "loss": 3.0, "tokens": 8192}]
    rows += [{"step": 4, "val_loss": 2.5}, {"step": 4, "forward_seconds": 1, "step_seconds": 2}]
    content = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 5, "lo'
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\n" + content.encode())
    (tmp_path / "samples.jsonl").write_text('{"step": 5, "text": "b\u2028c"}\n{"step": 12, "te')
    (tmp_path / "settings.json").write_text('{"arguments": ')
    history = read_history(tmp_path)
    assert (history.train, history.validation) == (rows[:2], rows[2:3])
    assert history.tokens_per_step == 2048
    assert history.samples == [{"step": 5, "text": "b\u2028c"}]
    assert history.settings == {}


def test_a_report_shows_every_number_that_was_logged(tmp_path):
    rows = [train_row(step, mfu=0.4, memory_gib=gib) for step, gib in ((1, 2), (2, None), (4, 3.5))]
    rows += [{"step": 2, "val_loss": 2.5}]
    rows += [{"step": 4, "val_loss": 2.75, "val_perplexity": 15.64, "val_bits_per_byte": 1.25}]
    settings = {
        "command": ["train.py", "--sample_prompt", "def x"],
        "arguments": {"batch_size": 3, "run_name": None},
        "model": {"dim": 77},
        "engine": "DeepSpeed ZeRO-2",
        "deepspeed": {"zero_optimization": {"stage": 2}},
        "packages": {"torch": "2.99"},
    }
    page = report(write_run(tmp_path / "run", rows, settings=settings))
    for said in (
        *("state not finished", "steps 4", "tokens 4,000", "training time 0:00:08"),
        *("training loss 2.5000", "validation loss 2.7500", "perplexity 15.64"),
        *("best validation loss 2.5000 at step 2", "bits per byte 1.2500", "epochs 0.04"),
        *("tokens per second 500", "MFU 40.0%", "peak memory in GiB 3.50", "skipped steps 0"),
        "Loss nats per token training 2.5 validation 2.75",
        *("train.py --sample_prompt 'def x'", "batch_size 3", "run_name null", "dim 77"),
        *("engine DeepSpeed ZeRO-2", '"stage": 2', "torch 2.99"),
    ):
        assert said in page.words
    assert "0.0002</text>" in page.source  # learning rate
    titles = ["Loss", "Learning rate", "Gradient norm", "Throughput", "MFU", "Memory", "Settings"]
    assert page.titles == titles


def test_a_curve_has_a_gap_where_the_loss_was_not_finite(tmp_path):
    values = {1: 1.0, 2: 2.0, 3: None, 4: 4.0, 5: 5.0}
    run = write_run(tmp_path / "run", [train_row(*row) for row in values.items()])
    axes = drawn("Loss", run)
    (line,) = axes.lines
    expected = [(step, NAN if loss is None else loss) for step, loss in values.items()]
    np.testing.assert_array_equal(line.get_xydata(), expected)
    assert (axes.get_xlabel(), line.get_marker()) == ("steps", "o")
    assert "steps</text>" in report(run).source


def test_numbers_that_were_not_measured_are_left_out(tmp_path):
    page = report(write_run(tmp_path / "run", [train_row(1, loss=None)]))
    assert page.titles == ["Learning rate", "Gradient norm", "Throughput", "Memory", "Settings"]
    for word in ("MFU", "finished model", "None", "nan"):
        assert word not in page.words


def test_text_of_a_run_cannot_become_markup_and_the_page_loads_nothing(tmp_path):
    run = write_run(
        tmp_path / "<img src=x onerror=alert(2)>",
        [train_row(1), {"step": 1, "val_loss": 2.0}],
        samples=[{"step": 1, "prompt": NASTY, "text": NASTY}],
        settings={"command": ["x", NASTY], "arguments": {NASTY: NASTY}, "engine": NASTY},
    )
    for page in (report(run), report(run, write_run(tmp_path / "b", [train_row(1)]))):
        assert not {"script", "img"} & {*page.tags}
        assert not any(name.startswith("on") for name, _ in page.attributes)
        assert "</script><script>alert(1)</script> & <b>" in page.words
        assert "{{title}}" in page.words
        sources = [value for name, value in page.attributes if name in ("src", "href", "action")]
        assert sources == ["data:,"]
        assert not re.search(r"https?:|@import|url\((?!#)", page.source)


def test_samples_are_spread_evenly_and_the_finished_models_sample_comes_last(tmp_path):
    samples = [{"step": s, "prompt": "def ", "text": f"sample {s}"} for s in range(10, 1010, 10)]
    run = write_run(tmp_path / "run", [train_row(1)], samples)
    (run / "sample.txt").write_text("def the_end")
    assert "the_end" not in report(run).words  # the run is not finished
    (run / "weights").mkdir()
    page = report(run)
    steps = re.findall(r"<h3>run, step ([\d,]+)</h3>", page.source)
    assert steps == [f"{step:,}" for step in range(10, 1010, 990 // (SAMPLES - 1))]
    assert page.words.index("sample 1000") < page.words.index("the_end")
    assert "state finished" in page.words


def test_several_runs_share_charts_and_a_table_lists_their_differences(tmp_path):
    runs = [
        write_run(
            tmp_path / name / "run",
            [train_row(step, loss=loss, tokens=step * tokens) for step in (1, steps)],
            samples=[{"step": step, "text": f"{name} at {step}"} for step in (1, 2)],
            settings={"arguments": {"seed": 1, "dim": dim}, "command": ["train", name]},
        )
        for name, loss, dim, tokens, steps in (("a", 3.0, 64, 1000, 10), ("b", 2.0, 128, 4000, 5))
    ]
    page = report(*runs)
    assert all(str(run) in page.words for run in runs)  # both have the same name
    assert page.words.count("training loss 3.0000 2.0000") == 1
    assert all(said in page.words for said in ("dim 64 128", "train a", "a at 2"))
    assert "seed" not in page.words
    # The runs' steps have different sizes, so the axis has tokens.
    axes = drawn("Training loss", *runs)
    assert axes.get_xlabel() == "tokens"
    assert [line.get_color() for line in axes.lines] == [*COLORS[:2]]
    assert [line.get_xdata()[-1] for line in axes.lines] == [10_000, 20_000]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"sampled_softmax": 1, "token_noise": 0.0}, ""),
        ({"sampled_softmax": 16}, " (estimate over a part of the vocabulary)"),
        ({"sampled_softmax": 1, "token_noise": 0.1}, " (with noise in the input)"),
    ],
)
def test_a_training_loss_that_is_no_measure_of_the_model_is_named_so(tmp_path, flags, said):
    rows = [train_row(1), {"step": 1, "val_loss": 2.75}]
    run = write_run(tmp_path / "run", rows, settings={"arguments": flags})
    other = write_run(tmp_path / "other", rows)
    (loss,) = losses(by_name([run]))
    train, validation = losses(by_name([run, other]))
    assert [curve.label for curve in loss.curves] == [f"training{said}", "validation"]
    assert [curve.label for curve in train.curves] == [f"run{said}", "other"]
    assert [curve.label for curve in validation.curves] == ["run", "other"]


def test_numbers_are_shown_in_a_short_form():
    values = (0, 2.90493, 0.0003, 1e-5, 17_243.3, 2_457_600, 3e9, 1e20, -1.5)
    texts = "0 2.905 0.0003 1e-05 17,243 2.458M 3B 1e+20 -1.5"
    assert [show(value) for value in values] == texts.split()


def test_a_page_of_one_run_is_in_its_folder_and_of_several_in_out(tmp_path, capsys, monkeypatch):
    rows = [train_row(1, loss=3.0), train_row(2), {"step": 2, "val_loss": 2}]
    run, other = (write_run(tmp_path / name, rows) for name in ("run", "other"))
    monkeypatch.chdir(tmp_path)  # the template is found from anywhere
    draw_losses([run], Path("loss.png"))
    pixels = (image.imread("loss.png")[..., :3] * 255).round()
    for color in ((31, 95, 191), (194, 84, 10)):  # training, validation
        assert (pixels == color).all(-1).sum() > 20
    report_script.main([str(run)])
    assert "<h1>run</h1>" in (run / "report.html").read_text(encoding="utf-8")
    assert str(run / "report.html") in capsys.readouterr().out
    report_script.main([str(run), str(other), str(run)])
    assert "<h1>run, other</h1>" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_try_to_returns_the_path_or_why_there_is_no_report(tmp_path):
    run = RunFolder(write_run(tmp_path / "run", [train_row(1)]))
    assert try_to(write_report, [run.path], run.report) == str(run.report)
    run.report.unlink()
    run.report.mkdir()
    assert try_to(write_report, [run.path], run.report).startswith("NOT WRITTEN: ")
    run.metrics.write_text("")
    assert "has not logged a step yet" in try_to(write_report, [run.path], run.report)


def test_a_wrong_argument_is_refused_in_one_line(tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    assert "missing: no such folder" in refusal(report_script, "missing")
    assert "has no metrics.jsonl: it is not the folder of a run" in refusal(report_script, ".")
