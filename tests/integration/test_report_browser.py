"""report.html in a browser: its width fits, dark mode inverts curves, no error is logged."""

import json

import pytest

from lm.report.page import write_report

pytestmark = pytest.mark.slow

LONG_NAME = "a-name-without-spaces-" + "x" * 80


@pytest.mark.parametrize(("width", "dark"), [(375, True), (1280, False)])
def test_a_report_of_two_runs_fits_the_width_of_the_window(browser, tmp_path, width, dark):
    for name in (LONG_NAME, "唐詩"):
        (tmp_path / name).mkdir()
        rows = [{"step": i, "tokens": 8 * i, "loss": 9 / i, "grad_norm": 0.5} for i in range(1, 99)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        sample = {"step": 1, "text": "</script><script>alert(1)</script>" + "長" * 200}
        (tmp_path / name / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    write_report([tmp_path / LONG_NAME, tmp_path / "唐詩"], tmp_path / "report.html")
    browser.open(tmp_path / "report.html", width, dark)
    assert browser.run("document.documentElement.scrollWidth") <= width
    filtered = browser.run("getComputedStyle(document.querySelector('svg')).filter")
    assert ("invert" in filtered) == dark
    assert browser.problems == []
