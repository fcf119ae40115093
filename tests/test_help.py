"""The usage lines of SCRIPTS, and unknown flags."""

import importlib
import re
import sys

import pytest
from conftest import run

SCRIPTS = (
    *("generate", "chat", "serve", "prepare_data", "evaluate", "export_hf", "export_gguf"),
    *("import_weights", "report"),
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_usage_line_can_be_typed_and_has_placeholders_in_capitals(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"scripts.{name}").main(["--help"])
    assert ended.value.code == 0
    usage = capsys.readouterr().out.partition("\n\n")[0]
    assert usage.startswith(f"usage: python -m scripts.{name} ")
    # Required arguments stand outside brackets; only prepare_data has none.
    places = re.sub(r"\[[^]]*\]", "", usage.partition(f"scripts.{name}")[2]).split()
    assert set(places) <= {"RUN", "OUT", "SOURCE"}
    assert places or name == "prepare_data"


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_unknown_flag_is_refused_without_loading_torch(name, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('nobody needs it yet')\n")
    command = [sys.executable, "-m", f"scripts.{name}", "--nonsense", "RUN", "OUT"]
    ended = run(command, PYTHONPATH=str(tmp_path))
    assert "unrecognized arguments: --nonsense" in ended.error(name)
