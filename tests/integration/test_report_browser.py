"""report.html in a real browser: its width, the console and the switch between steps and tokens."""

import json

import pytest

from report.page import write_report

pytestmark = pytest.mark.slow

LONG_NAME = "a-name-without-spaces-" + "x" * 80
SHOWN = """[...document.querySelectorAll("svg")].filter((svg) => svg.getClientRects().length)
.map((svg) => svg.closest("div").className)"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [375, 1280])
def test_two_runs_fit_the_window_over_steps_and_over_tokens(browser, tmp_path, width, dark):
    for name in (LONG_NAME, "唐詩"):
        (tmp_path / name).mkdir()
        rows = [{"step": i, "tokens": 8 * i, "loss": 9 / i, "grad_norm": 0.5} for i in range(1, 99)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        sample = {"step": 1, "text": "</script><script>alert(1)</script>" + "長" * 200}
        (tmp_path / name / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    write_report([tmp_path / LONG_NAME, tmp_path / "唐詩"], tmp_path / "report.html")
    browser.open(tmp_path / "report.html", width, dark)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(SHOWN) == ["steps", "steps"]
    browser.run("document.getElementById('over-tokens').click()")
    assert browser.run(SHOWN) == ["tokens", "tokens"]
    color = "getComputedStyle(document.querySelector('svg text')).fill"
    assert (int(browser.run(color).strip("rgb()").split(",")[0]) > 128) == dark
    assert browser.problems == []
