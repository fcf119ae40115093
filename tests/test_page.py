"""report.html read as a browser would, without one."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import REPOSITORY

from report.charts import BARS
from report.page import SAMPLES, leave_report, write_report
from runs.folder import RunFolder
from scripts.report import main

VOID = ("meta", "link", "input", "path")
NASTY = '</script><script>alert(1)</script> & <b> "quoted" {{title}} 春眠\ud800\x00'


class Page(HTMLParser):
    """Elements, the charts' data and what a reader sees; fails where tags do not nest."""

    def __init__(self, path: Path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open, self.tags, self.text = [], [], []
        self.attributes, self.paths, self.charts = [], [], []
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append(tag)
        self.attributes += attributes
        if tag == "figure":
            self.charts.append(json.loads(values["data-chart"]) | {"paths": []})
        if tag == "path" and values["class"] != "grid":
            self.charts[-1]["paths"].append(values)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.text.append(data.strip())

    @property
    def words(self) -> str:
        return " ".join(filter(None, self.text))


def train_row(step: int, loss=None, **more) -> dict:
    loss = 10 / step if loss is None else loss
    row = {"step": step, "tokens": step * 1000, "epoch": step / 100, "loss": loss}
    row |= {"learning_rate": 0.001, "grad_norm": 0.5, "skipped_steps": 0, "step_seconds": 2.0}
    return row | {"tokens_per_second": 500.0, "mfu": None, "memory_gib": 1.25} | more


def profile_row(step: int, **seconds) -> dict:
    phases = {"data": 0.1, "forward": 0.2, "backward": 0.3, "optimizer": 0.4, "step": 1.0}
    return {"step": step} | {f"{k}_seconds": v for k, v in (phases | seconds).items()}


def write_run(folder: Path, rows: list[dict], samples=(), settings: dict | None = None) -> Path:
    folder.mkdir(parents=True)
    for name, lines in (("metrics.jsonl", rows), ("samples.jsonl", samples)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in lines))
    if settings is not None:
        (folder / "settings.json").write_text(json.dumps(settings))
    return folder


def report(*runs: Path) -> Page:
    out = runs[0].parent / "report.html"
    write_report(list(runs), out)
    return Page(out)


def titles(page: Page) -> list[str]:
    found = re.findall(r"<figcaption><h2>(.*?)</h2>", page.source)
    assert len(found) == len(page.charts)
    return found


def chart(page: Page, title: str) -> dict:
    return page.charts[titles(page).index(title)]


def test_a_report_shows_every_number_that_was_logged(tmp_path):
    rows = [train_row(step, mfu=0.4) for step in (1, 2, 4)]
    rows += [{"step": 4, "val_loss": 2.75, "val_perplexity": 15.64, "val_bits_per_byte": 1.25}]
    rows += [profile_row(4)]
    page = report(write_run(tmp_path / "run", rows))
    assert titles(page) == [
        *("Loss", "Learning rate", "Gradient norm", "Throughput", "MFU", "Memory"),
        "Time of profiled steps",
    ]
    training, validation = chart(page, "Loss")["series"]
    assert training == {"tokens": 1000, "x": [1, 2, 4], "y": [10, 5, 2.5]}
    assert validation == {"tokens": 1000, "x": [4], "y": [2.75]}
    assert chart(page, "MFU")["series"][0]["y"] == [40, 40, 40]
    assert [s["y"] for s in chart(page, "Time of profiled steps")["series"]] == [
        *([0.1], [0.2], [0.3], [0.4])
    ]
    for said in (
        *("state not finished", "steps 4", "tokens 4,000", "training time 0 min 8 s"),
        *("training loss 2.5000", "validation loss 2.7500", "perplexity 15.64"),
        *("bits per byte 1.2500", "tokens per second 500", "MFU 40.0%", "peak memory 1.25 GiB"),
    ):
        assert said in page.words


def test_the_peak_of_memory_is_that_of_all_starts_of_a_run(tmp_path):
    memory = {1: 2.0, 2: 3.5, 3: 1.5, 4: None}  # resumed at step 3
    rows = [train_row(step, memory_gib=gib) for step, gib in memory.items()]
    assert "peak memory 3.50 GiB" in report(write_run(tmp_path / "run", rows)).words


def test_curves_are_drawn_without_a_script(tmp_path):
    page = report(write_run(tmp_path / "run", [train_row(s, loss=s) for s in (1, 2, 3, 4)]))
    line, dots = chart(page, "Loss")["paths"]
    assert line["d"] == "M250 1000L500 667L750 333L1000 0"
    assert dots["d"].count("M") == 4
    shown = page.source.split("<figure", 2)[1]
    assert all(f">{label}</span>" in shown for label in ("1", "4", "1,000", "4,000", "steps"))


def test_bars_of_a_profiled_step_stand_on_each_other(tmp_path):
    page = report(write_run(tmp_path / "run", [profile_row(10), profile_row(20)]))
    feet = [re.findall(r"M\d+ (\d+)h\d+v-(\d+)", p["d"]) for p in page.charts[0]["paths"]]
    bars = [("1000", "100"), ("900", "200"), ("700", "300"), ("400", "400")]
    assert feet == [[bar, bar] for bar in bars]


def test_missing_losses_leave_a_gap_and_a_point_alone_is_a_dot(tmp_path):
    rows = [train_row(step, loss=1.0) for step in range(1, 101)]
    for step in (50, 52, 53):
        rows[step - 1]["loss"] = None
    rows[52]["loss"] = float("nan")
    page = report(write_run(tmp_path / "run", rows))
    line, dots = chart(page, "Loss")["paths"]
    assert line["d"].count("M") == 3
    assert dots["d"] == "M510 500h0"
    assert 50 not in chart(page, "Loss")["series"][0]["x"]


def test_what_was_not_measured_is_left_out(tmp_path):
    page = report(write_run(tmp_path / "run", [train_row(1)]))
    assert "MFU" not in page.words
    assert "profiled" not in page.words
    assert "validation" not in page.words
    assert "What the model writes" not in page.words
    assert "settings.json is missing" in page.words
    assert "None" not in page.words


def test_one_row_without_any_loss_makes_a_page(tmp_path):
    rows = [train_row(1, loss=float("nan"), tokens=None, grad_norm=None)]
    page = report(write_run(tmp_path / "run", rows))
    assert "Loss" not in titles(page)
    assert "Learning rate" in titles(page)


def test_a_run_with_validations_alone_makes_a_page(tmp_path):
    page = report(write_run(tmp_path / "run", [{"step": 5, "val_loss": 2.0}]))
    assert titles(page) == ["Loss"]
    assert chart(page, "Loss")["token"] is None
    assert 'class="x tokens"' not in page.source


def test_text_from_outside_cannot_become_markup(tmp_path):
    run = write_run(
        tmp_path / "<img src=x onerror=alert(2)>",
        [train_row(1), {"step": 1, "val_loss": 2.0}],
        samples=[{"step": 1, "prompt": NASTY, "text": NASTY}],
        settings={"command": ["x", NASTY], "arguments": {NASTY: NASTY}, "engine": NASTY},
    )
    for page in (report(run), report(run, write_run(tmp_path / "b", [train_row(1)]))):
        assert page.tags.count("script") == 1
        assert not {"img", "b"} & {*page.tags} - {"b"}
        assert not any(name.startswith("on") for name, _ in page.attributes)
        assert "</script><script>alert(1)</script> & <b>" in page.words
        assert "{{title}}" in page.words


def test_the_page_needs_nothing_from_outside(tmp_path):
    page = report(write_run(tmp_path / "run", [train_row(1)], settings={"command": ["train"]}))
    sources = [value for name, value in page.attributes if name in ("src", "href", "action")]
    assert sources == ["data:,"]
    assert not re.search(r"https?:|@import|url\(|fetch\(|import\(", page.source)


def test_a_hundred_thousand_rows_stay_below_a_megabyte_and_keep_every_spike(tmp_path):
    rows = [train_row(step, loss=3.0, mfu=0.4) for step in range(1, 100_001)]
    rows[31_415]["loss"], rows[27_182]["loss"] = 77.0, 0.25
    rows += [profile_row(step) for step in range(10, 100_001, 100)]
    page = report(write_run(tmp_path / "run", rows))
    assert len(page.source.encode()) < 500_000
    losses = chart(page, "Loss")["series"][0]
    assert losses["y"][losses["x"].index(31_416)] == 77.0
    assert losses["y"][losses["x"].index(27_183)] == 0.25
    assert "of 100,000 points, all spikes among them" in page.words
    assert f"{BARS} of 1,000 points" in page.words


def test_thirty_runs_stay_below_a_megabyte(tmp_path):
    rows = [train_row(step, mfu=0.4) for step in range(1, 301)]
    page = report(*(write_run(tmp_path / f"run {i}", rows) for i in range(30)))
    assert len(page.source.encode()) < 1e6
    assert len(chart(page, "Training loss")["series"]) == 30


def test_samples_are_shown_evenly_and_the_finished_model_s_comes_last(tmp_path):
    samples = [{"step": s, "prompt": "def ", "text": f"sample {s}"} for s in range(10, 1010, 10)]
    run = write_run(tmp_path / "run", [train_row(1)], samples)
    (run / "sample.txt").write_text("def the_end")
    assert "the_end" not in report(run).words  # of a run that is not finished
    (run / "weights").mkdir()
    page = report(run)
    steps = [int(s) for s in re.findall(r"<h3>step ([\d,]+)</h3>", page.source.replace(",", ""))]
    assert (len(steps), steps[0], steps[-1]) == (SAMPLES, 10, 1000)
    assert f"{SAMPLES} of 100" in page.words
    assert page.words.index("sample 1000") < page.words.index("def the_end")
    assert "state finished" in page.words


def test_where_all_samples_are_shown_nothing_is_said_to_be_left_out(tmp_path):
    samples = [{"step": s, "prompt": "", "text": f"sample {s}"} for s in range(SAMPLES)]
    run = write_run(tmp_path / "run", [train_row(1)], samples)
    (run / "sample.txt").write_text("the end")
    (run / "weights").mkdir()
    assert "all are in" not in report(run).words


def test_settings_are_all_there(tmp_path):
    settings = {
        "command": ["train.py", "--sample_prompt", "def x"],
        "arguments": {"batch_size": 3, "run_name": None},
        "model": {"dim": 77},
        "engine": "DeepSpeed ZeRO-2",
        "processes": 5,
        "deepspeed": {"zero_optimization": {"stage": 2}},
        "packages": {"torch": "2.99"},
    }
    page = report(write_run(tmp_path / "run", [train_row(1)], settings=settings))
    for said in (
        *("train.py --sample_prompt 'def x'", "batch_size 3", "run_name –", "dim 77"),
        *("engine DeepSpeed ZeRO-2", "processes 5", '"stage": 2', "torch 2.99"),
    ):
        assert said in page.words


def test_several_runs_share_charts_and_differ_in_a_table(tmp_path):
    runs = [
        write_run(
            tmp_path / name,
            [train_row(1, loss=loss), train_row(2, loss=loss, tokens=tokens)],
            settings={"arguments": {"seed": 1, "dim": dim}, "command": ["train", name]},
        )
        for name, loss, dim, tokens in (("a", 3.0, 64, 2000), ("b", 2.0, 128, 8000))
    ]
    page = report(*runs)
    losses = chart(page, "Training loss")
    assert [series["y"] for series in losses["series"]] == [[3, 3], [2, 2]]
    lines = [path["style"] for path in losses["paths"] if path["class"] == "line"]
    assert len({re.search(r"--color: (.*?);", line)[1] for line in lines}) == 2
    assert page.words.count("training loss 3.0000 2.0000") == 1
    assert "dim 64 128" in page.words
    assert "seed" not in page.words
    assert "train a" in page.words
    assert "train b" in page.words


def test_over_tokens_a_curve_is_stretched_by_its_run_s_tokens_per_step(tmp_path):
    runs = []
    for name, tokens, steps in (("a", 1000, 10), ("b", 4000, 5)):
        rows = [train_row(s, tokens=s * tokens) for s in range(1, steps + 1)]
        runs.append(write_run(tmp_path / name, rows))
    paths = chart(report(*runs), "Training loss")["paths"]
    stretch = [float(re.search(r"--stretch: (.*)", path["style"])[1]) for path in paths]
    # Over 10 steps a reaches the end and b half; over 20,000 tokens a reaches half and b the end.
    assert stretch == [0.5, 0.5, 2, 2]


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    runs = [write_run(tmp_path / parent / "run", [train_row(1)]) for parent in ("a", "b")]
    assert all(str(run) in report(*runs).words for run in runs)


def test_the_script_writes_into_the_run_s_folder_and_draws_a_picture(tmp_path, capsys, monkeypatch):
    run = write_run(tmp_path / "run", [train_row(1), train_row(2), {"step": 2, "val_loss": 3.0}])
    monkeypatch.chdir(tmp_path)  # the template is found from anywhere
    picture = tmp_path / "pictures" / "loss.svg"
    main([str(run), "--picture", str(picture)])
    assert "<h1>run</h1>" in (run / "report.html").read_text(encoding="utf-8")
    assert "<svg" in picture.read_text(encoding="utf-8")
    assert str(run / "report.html") in capsys.readouterr().out
    other = write_run(tmp_path / "other", [train_row(1)])
    main([str(run), str(other), str(run)])
    assert "<h1>2 runs</h1>" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    main([str(run), "--out", str(tmp_path / "deep" / "x.html")])
    assert (tmp_path / "deep" / "x.html").exists()


def test_a_run_that_ends_says_where_its_report_is_or_why_there_is_none(tmp_path):
    run = RunFolder(write_run(tmp_path / "run", [train_row(1)]))
    assert leave_report(run) == str(run.report)
    assert run.report.exists()
    run.report.unlink()
    run.report.mkdir()
    assert leave_report(run).startswith("NOT WRITTEN: ")
    assert "has no metrics.jsonl" in leave_report(RunFolder(tmp_path / "none"))


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ([], "the following arguments are required: RUN"),
        (["missing"], "missing: no such folder"),
        (["auto"], "out/runs yet: bash run_accelerate.sh makes one"),
        (["."], "has no metrics.jsonl"),
        ([".", "--picture", "loss.gif"], "--picture must end in .png or .svg"),
    ],
)
def test_mistakes_end_in_one_line(typed, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(typed)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert said in error
    assert error.count("\n") == 1


def test_help_does_not_wait_for_torch():
    code = "import sys, scripts.report; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
