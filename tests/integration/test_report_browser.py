"""report.html in a real browser: widths, switch, console."""

import json
from pathlib import Path

import pytest
from browser import Browser

from report.page import write_report

pytestmark = pytest.mark.slow

LONG_NAME = "a-name-without-spaces-" + "x" * 80


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """The report of two runs with long and foreign names."""
    folder = tmp_path_factory.mktemp("runs")
    for name in (LONG_NAME, "唐詩"):
        (folder / name).mkdir()
        rows = [{"step": i, "tokens": 8 * i, "loss": 9 / i, "grad_norm": 0.5} for i in range(1, 99)]
        (folder / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        sample = {"step": 1, "text": "</script><script>alert(1)</script>" + "長" * 200}
        (folder / name / "samples.jsonl").write_text(json.dumps(sample) + "\n")
        settings = {"command": ["train.py", LONG_NAME], "arguments": {"name": name}}
        (folder / name / "settings.json").write_text(json.dumps(settings))
    write_report([folder / LONG_NAME, folder / "唐詩"], folder / "report.html")
    return folder / "report.html"


def shown(browser: Browser) -> list[str]:
    """The names of the horizontal axes that one sees."""
    names = "[...document.querySelectorAll('svg')].filter((svg) => svg.getClientRects().length)"
    names += ".map((svg) => svg.closest('div').className)"
    return browser.run(names)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [375, 1280])
def test_the_page_fits_its_window_and_keeps_the_console_silent(browser, report, width, dark):
    browser.open(report, width, dark)
    assert browser.run("document.documentElement.scrollWidth") <= width
    text, paper = (
        browser.run(f"getComputedStyle(document.querySelector('{name}')).{key}").strip("rgb()")
        for name, key in (("svg text", "fill"), ("body", "backgroundColor"))
    )
    assert (int(text.split(",")[0]) > int(paper.split(",")[0])) == dark
    assert browser.problems == []


def test_the_switch_shows_the_same_charts_over_tokens(browser, report):
    browser.open(report, 1280)
    assert shown(browser) == ["steps", "steps"]
    browser.run("document.getElementById('over-tokens').click()")
    assert shown(browser) == ["tokens", "tokens"]
