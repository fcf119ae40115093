"""Samples during training. The integration tests check the files at the end of a run."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from lm.data.dataset import PackedDataset
from lm.data.shards import TEXT
from lm.data.tokenizer import Tokenizer
from lm.storage.folder import RunFolder
from lm.training import results
from lm.training.arguments import TrainingArguments
from lm.training.results import PROMPT_TOKENS, prompt_and_continuations, write_sample
from model import LMConfig, Transformer


@pytest.fixture
def text(packed) -> PackedDataset:
    return PackedDataset(packed, "val", 32)


@pytest.fixture
def model(text) -> Transformer:
    torch.manual_seed(0)
    shape = {"dim": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32, "dropout": 0.5}
    return Transformer(LMConfig(**shape, vocab_size=text.vocab_size)).train()


@pytest.fixture
def write(accelerator, text, model, tmp_path):
    """Writes a sample of a step into tmp_path."""
    folder = RunFolder(tmp_path)
    shutil.copy(text.tokenizer_path, tmp_path)

    def write(step: int, is_main: bool = True, **flags) -> None:
        args = TrainingArguments(**{"sample_tokens": 8} | flags)
        here = SimpleNamespace(is_main_process=is_main, trackers=[])
        log = SimpleNamespace(accelerator=here, folder=folder, total_steps=10, say=print)
        write_sample(step, model, SimpleNamespace(args=args, val_set=text), log)

    return write


def test_each_sample_has_its_step_its_prompt_and_that_steps_text(write, model, tmp_path, capsys):
    write(2, sample_prompt="第1句")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    prompt = "A long question, of which the end is shown with the answer. 第1句"
    write(4, sample_prompt=prompt)
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    first, second = map(json.loads, lines)
    assert second.keys() == {"step", "prompt", "text"}
    assert (first["step"], second["step"], second["prompt"]) == (2, 4, prompt)
    assert "第1句" in lines[-1]  # not escaped in the file
    assert second["text"]
    assert first["text"] != second["text"]
    shown = (prompt[-40:] + second["text"])[:80]
    assert f"step 4/10  sample {shown!r}" in capsys.readouterr().out


def test_without_a_prompt_the_beginning_of_the_validation_text_is_used(text, model):
    tokenizer = Tokenizer(text.tokenizer_path)

    def written(data, seed: int = 1) -> tuple[str, list[str]]:
        args = TrainingArguments(sample_tokens=3, seed=seed)
        inputs = SimpleNamespace(args=args, val_set=data)
        return prompt_and_continuations(model, tokenizer, inputs, count=2)

    prompt, _ = written(text)
    assert prompt
    assert tokenizer.decode(text[0][0].tolist()).startswith(prompt)
    assert len(tokenizer.encode(prompt)) <= PROMPT_TOKENS
    texts = [written(text, seed)[1] for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    assert texts[0][0] != texts[0][1] == texts[1][0]  # continuation i is drawn with seed + i
    # The prompt does not end inside a character.
    ids = torch.tensor([tokenizer.bos_id, *tokenizer.encode("🤗" * 8)])
    assert len(ids) == 33  # BOS and 8 × 4 bytes; the first PROMPT_TOKENS are BOS and 11 bytes
    data = type("Text", (list,), {"kind": TEXT})([(ids, None)])
    assert written(data)[0] == "🤗🤗"


def test_the_main_process_samples_in_the_training_precision_and_reports_a_failed_write(
    write, tmp_path, monkeypatch, capsys
):
    used = []

    def continuation(decoder, *rest):
        used.append(decoder.dtype)
        return "", [""]

    monkeypatch.setattr(results, "prompt_and_continuations", continuation)
    for dtype in ("float32", "bfloat16"):
        write(2, dtype=dtype)
    write(2, is_main=False)
    assert used == [torch.float32, torch.bfloat16]
    (tmp_path / "samples.jsonl").unlink()
    (tmp_path / "samples.jsonl").mkdir()
    write(2)
    assert "SAMPLE NOT WRITTEN" in capsys.readouterr().out
