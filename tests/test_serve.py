"""What scripts.serve says before it serves; test_serve_launch.py has the rest."""

import importlib.util

import pytest

from scripts.serve import main


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["auto", "--port", "70000"], "--host 127.0.0.1 --port 70000: "),
        (["auto", "--host", "not.an.address.invalid"], "--host not.an.address.invalid --port 8000"),
        (["auto", "--top_p", "0"], "--top_p must be above 0 and at most 1, not 0.0"),
        (["auto", "--batch_size", "0"], "--batch_size must be at least 1, not 0"),
    ],
)
def test_a_mistake_is_one_line(capsys, flags, error):
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"serve: error: {error}")
    assert said.count("\n") == 1


def test_packages_that_are_missing_are_named(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["auto"])
    assert ended.value.code == 2
    told = "serve: error: serving takes fastapi uvicorn: python -m pip install fastapi uvicorn\n"
    assert capsys.readouterr().err == told
