"""The commands and the program of docs/fine-tuning.md that tune a model by TRL."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, VOCAB_SIZE, run
from small_model import opinionated, save_model
from test_export_hf import logits_of, some_tokens
from test_readmes import code_blocks

from lm.data.chat_template import PLAIN_JINJA, TEMPLATE_FILE
from lm.storage.weights import load_trained

pytestmark = pytest.mark.slow


def page() -> tuple[dict, str, list[str]]:
    """Return the example of a pair, the program, and the shell commands, in the page's order."""
    text = (REPOSITORY / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## Preference tuning.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    pair, program, *shell = code_blocks(section)
    return json.loads(pair), program, "".join(shell).replace("\n    ", "\n").strip().splitlines()


def test_the_page_tunes_a_run_by_trl_and_imports_the_result(packed, tmp_path):
    pair, program, (install, *commands) = page()
    assert install.startswith("python -m pip install trl==")
    pytest.importorskip("trl", reason="needs TRL, see the page")
    before = (
        tmp_path / "out" / "runs" / "chat"
    )  # fine-tuned, with separate input and output matrices
    model = opinionated(VOCAB_SIZE, 256, tie_embeddings=False)
    save_model(before / "weights", model, packed)
    (before / "weights" / TEMPLATE_FILE).write_text(f"{PLAIN_JINJA}\n", encoding="utf-8")
    (before / "metrics.jsonl").touch()  # `auto` is the run that logged last
    (tmp_path / "preferences.jsonl").write_text(f"{json.dumps(pair)}\n" * 40, encoding="utf-8")
    (tmp_path / "dpo.py").write_text(program, encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    said = [
        run(["bash", "-c", command], tmp_path, PATH=path, PYTHONPATH=str(REPOSITORY)).worked()
        for command in commands
    ]
    result = tmp_path / "out" / "imported" / "dpo"
    trained = load_trained(str(result))
    assert trained.chats
    assert (result / "tokenizer.model").read_bytes() == (packed / "tokenizer.model").read_bytes()
    assert not trained.model.config.tie_embeddings
    with torch.no_grad():
        logits = trained.model(some_tokens()).logits
        assert (logits - model(some_tokens()).logits).abs().max() > 1e-3  # it was trained
    torch.testing.assert_close(logits, logits_of(tmp_path / "out/hf/dpo"), atol=1e-4, rtol=0)
    losses = [re.findall("^ +loss: +([0-9.]+)", out, re.MULTILINE) for out in said]
    assert [len(found) for found in losses if found] == [2]  # before and after
