"""report.html in a real browser: widths, dark mode, contrast, read-out, switch, console."""

import json
import math
from pathlib import Path

import pytest
from browser import Browser

from report.page import write_report

pytestmark = pytest.mark.slow

WIDTHS = (375, 1280)  # a phone, a desktop
LONG_NAME = "a-name-without-spaces-" + "x" * 80

# Colors as the browser computes them; every element that has text of its own.
CONTRASTS = """
(() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const luminance = (text) => {
    const [r, g, b] = channels(text).map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = (node) => {
    const color = getComputedStyle(node).backgroundColor;
    return (channels(color)[3] ?? 1) === 0 ? paper(node.parentElement) : color;
  };
  const hasText = (node) => [...node.childNodes].some(
    (child) => child.nodeType === Node.TEXT_NODE && child.textContent.trim());
  const nodes = [...document.body.querySelectorAll("*:not(script)")].filter(hasText);
  const contrast = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const against = (color, node) => contrast(luminance(color), luminance(paper(node)));
  const lines = [...document.querySelectorAll(".line")];
  return {
    text: nodes.map((node) => against(getComputedStyle(node).color, node)),
    lines: lines.map((node) => against(getComputedStyle(node).stroke, document.body)),
  };
})()
"""


def write_run(folder: Path, tokens_per_step: int = 4096, steps: int = 50) -> Path:
    """A run of made-up numbers, a profiled step and a validation in ten, and samples."""
    folder.mkdir()
    rows = []
    for step in range(1, steps + 1):
        row = {"step": step, "tokens": step * tokens_per_step, "loss": 3 + math.exp(-step / 10)}
        row |= {"learning_rate": 1e-3, "grad_norm": 0.5, "tokens_per_second": 2e4, "mfu": 0.4}
        rows.append(row | {"memory_gib": 1.5, "step_seconds": 0.2})
        if step % 10 == 0:
            rows.append({"step": step, "val_loss": 3.5 - step / 100, "val_perplexity": 20})
            phases = ("data", "forward", "backward", "optimizer", "step")
            rows.append({"step": step} | {f"{phase}_seconds": 0.1 for phase in phases})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sample = {
        "step": steps,
        "prompt": "春眠",
        "text": "</script><script>alert(1)</script>" + "長" * 200,
    }
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    settings = {"command": ["train.py", "--name", LONG_NAME], "arguments": {"name": LONG_NAME}}
    (folder / "settings.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """The report of one run, and of three with long and foreign names."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder / "run")]
    runs += [write_run(folder / LONG_NAME, 8192, 100), write_run(folder / "唐詩", 1024, 20)]
    pages = {"one": folder / "one.html", "several": folder / "several.html"}
    write_report(runs[:1], pages["one"])
    write_report(runs, pages["several"])
    return pages


def legend(browser: Browser, figure: int = 0) -> list[str]:
    texts = "[...document.querySelectorAll('figure')[%d].querySelectorAll('li b')]"
    return browser.run(texts % figure + ".map((b) => b.textContent)")


def read_out(browser: Browser) -> str:
    return browser.run("document.querySelector('output').textContent")


def plot_box(browser: Browser) -> dict:
    box = browser.run("document.querySelector('.plot').getBoundingClientRect().toJSON()")
    assert box["width"] > 200
    return box


@pytest.mark.parametrize("page", ["one", "several"])
@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_is_wider_than_its_window(browser, pages, page, width):
    browser.open(pages[page], width)
    assert browser.run("document.querySelectorAll('figure').length") >= 7
    assert browser.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_curves_stand_out_from_the_paper_as_wcag_aa_asks(browser, pages, dark):
    browser.open(pages["several"], 1280, dark)
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (int(paper.partition("(")[2].partition(",")[0]) < 128) == dark
    contrasts = browser.run(CONTRASTS)
    assert len(contrasts["text"]) > 100
    assert min(contrasts["text"]) >= 4.5
    assert min(contrasts["lines"]) >= 3


def test_the_pointer_reads_the_values_under_it(browser, pages):
    browser.open(pages["one"], 1280)
    before = legend(browser)
    box = plot_box(browser)
    browser.point_at(box["x"] + box["width"] * 0.4, box["y"] + 50)
    assert read_out(browser) == "step 20"
    assert legend(browser) == ["3.1353", "3.3"]
    browser.point_at(box["x"] + box["width"] * 0.5, box["y"] + 50)
    assert legend(browser) == ["3.0821", "3.3 (step 20)"]  # validations are elsewhere
    browser.point_at(1, 1)
    assert (read_out(browser), legend(browser)) == ("", before)


def test_the_arrow_keys_read_the_values_too(browser, pages):
    browser.open(pages["one"], 375)
    browser.run("document.querySelector('.plot').focus()")
    browser.press("Home")
    assert read_out(browser) == "step 1"
    for _ in range(3):
        browser.press("ArrowRight")
    browser.press("ArrowLeft")
    assert read_out(browser) == "step 3"
    browser.press("End")
    assert read_out(browser) == "step 50"
    browser.press("Escape")
    assert read_out(browser) == ""


def test_the_switch_lays_runs_over_each_other_by_tokens(browser, pages):
    browser.open(pages["several"], 1280)
    widths = "[...document.querySelectorAll('.line')].slice(0, 3)"
    widths += ".map((line) => line.getBoundingClientRect().right)"
    box, names = plot_box(browser), "document.querySelector('.plot').innerText.split('\\n').pop()"
    assert browser.run(names) == "steps"
    steps = [(right - box["x"]) / box["width"] for right in browser.run(widths)]
    assert steps == pytest.approx([0.5, 1, 0.2], abs=0.01)
    browser.run("document.getElementById('over-tokens').click()")
    tokens = [(right - box["x"]) / box["width"] for right in browser.run(widths)]
    assert tokens == pytest.approx([0.25, 1, 0.025], abs=0.01)  # of 819,200
    assert browser.run(names) == "tokens"
    browser.point_at(box["x"] + box["width"] * 0.25, box["y"] + 50)
    assert read_out(browser) == "204,800 tokens"
    assert legend(browser) == ["3.0067", "3.0821", "–"]  # steps 50 and 25; the third has ended


def test_a_shrunken_window_keeps_the_size_of_text(browser, pages):
    size = "getComputedStyle(document.querySelector('.plot .x')).fontSize"
    sizes = set()
    for width in WIDTHS:
        browser.open(pages["one"], width)
        sizes.add(browser.run(size))
    assert sizes == {"12.8px"}


def test_the_console_stays_silent_and_no_sample_runs_as_a_script(browser, pages):
    for page in pages.values():
        browser.open(page, 1280)
        assert browser.run("document.querySelectorAll('script').length") == 1
        assert "</script><script>alert(1)" in browser.run("document.body.innerText")
    assert browser.problems == []


def test_complaints_of_a_console_are_heard(browser, tmp_path):
    """The test above could not fail otherwise."""
    page = tmp_path / "wrong.html"
    page.write_text("<script>console.error('here'); nothing.at.all</script>")
    browser.open(page, 1280)
    heard, browser.problems = browser.problems, []
    assert len(heard) == 2
