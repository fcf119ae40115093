import json
import shutil

import pytest
import torch

from data.dataset import PackedDataset
from data.shards import TEXT
from data.tokenizer import Tokenizer
from model import LMConfig, Transformer
from training import samples
from training.arguments import TrainingArguments
from training.log import TrainingLog
from training.samples import PROMPT_TOKENS, SampleWriter, prompt_and_continuation


@pytest.fixture
def text(packed) -> PackedDataset:
    return PackedDataset(packed, "val", 32)


@pytest.fixture
def model(text) -> Transformer:
    torch.manual_seed(0)
    shape = {"dim": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32, "dropout": 0.5}
    return Transformer(LMConfig(**shape, vocab_size=text.vocab_size)).train()


@pytest.fixture
def writer_of(accelerator, text, model, tmp_path):
    """Makes a SampleWriter that writes into tmp_path."""
    logs = []

    def make(first_step: int = 1, **flags) -> SampleWriter:
        args = TrainingArguments(**{"sample_tokens": 8} | flags)
        log = TrainingLog(
            accelerator,
            tmp_path / "metrics.jsonl",
            log_interval=1,
            tokens_per_step=64,
            flops_per_token=1,
            total_steps=10,
            first_step=first_step,
        )
        logs.append(log)
        shutil.copy(text.tokenizer_path, tmp_path)
        writer = SampleWriter(args, tmp_path / "samples.jsonl", lambda: model, text, log)
        writer.open()
        return writer

    yield make
    for log in logs:
        log.close()


def test_every_sample_has_step_prompt_and_text_by_the_weights_of_its_step(
    writer_of, model, tmp_path, capsys
):
    writer = writer_of(sample_prompt="第1句")
    writer.write(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    writer.write(4)
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    first, second = map(json.loads, lines)
    assert second.keys() == {"step", "prompt", "text"}
    assert (first["step"], second["step"], second["prompt"]) == (2, 4, "第1句")
    assert "第1句" in lines[-1]  # readable in the file too
    assert second["text"]
    assert first["text"] != second["text"]
    shown = (second["prompt"] + second["text"])[:80]
    assert f"step 4/10  sample {shown!r}" in capsys.readouterr().out


def test_the_prompt_is_how_the_validation_text_begins_if_none_is_given(text, model):
    tokenizer = Tokenizer(text.tokenizer_path)
    args = TrainingArguments(sample_tokens=3)
    prompt, _ = prompt_and_continuation(model, args, tokenizer, text)
    assert prompt
    assert tokenizer.decode(text[0][0].tolist()).startswith(prompt)
    assert len(tokenizer.encode(prompt)) <= PROMPT_TOKENS
    seeds = (TrainingArguments(seed=seed) for seed in (1, 2, 1))
    texts = [prompt_and_continuation(model, args, tokenizer, text)[1] for args in seeds]
    assert texts[0] == texts[2] != texts[1]
    # The prompt does not end within a character.
    ids = torch.tensor([tokenizer.bos_id, *tokenizer.encode("🤗" * 8)])
    assert len(ids) == 33  # four bytes each, of which PROMPT_TOKENS takes 11
    data = type("Text", (list,), {"kind": TEXT})([(ids, None)])
    assert prompt_and_continuation(model, args, tokenizer, data)[0] == "🤗🤗"


def test_the_main_process_writes_in_the_precision_of_training_and_a_disk_may_refuse(
    writer_of, tmp_path, monkeypatch, capsys
):
    used = []

    def continuation(decoder, *rest):
        used.append(decoder.dtype)
        return "", ""

    monkeypatch.setattr(samples, "prompt_and_continuation", continuation)
    for dtype in ("float32", "bfloat16"):
        writer_of(dtype=dtype).write(2)
    assert used == [torch.float32, torch.bfloat16]
    writer = writer_of()
    (tmp_path / "samples.jsonl").unlink(missing_ok=True)
    (tmp_path / "samples.jsonl").mkdir()
    writer.write(2)
    assert "SAMPLE NOT WRITTEN" in capsys.readouterr().out
    monkeypatch.setattr(type(writer.log.accelerator), "is_main_process", False)
    writer.write(2)
    assert len(used) == 3
    assert capsys.readouterr().out == ""
