"""train_sft_accelerate.py: answers become likelier, all engines give equal losses, runs resume."""

import json
import shutil
from collections import ChainMap
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import VOCAB_SIZE, Trained, launch_command, pack, train
from small_model import opinionated, save_model

from lm.data.conversation_set import ConversationRows
from lm.data.order import MicroBatchSampler
from lm.storage.weights import load_trained
from lm.training.arguments import SFTArguments
from model.lora import LoRA, merged_weights

pytestmark = pytest.mark.slow

SFT = "train_sft_accelerate.py"
CONTEXT = 96  # a row has room for several conversations
FLAGS = "--dtype float32 --lr_schedule constant --warmup_steps 0 --learning_rate 1e-2 "
FLAGS += f"--max_seq_len {CONTEXT}"


@pytest.fixture(scope="module")
def base(packed, tmp_path_factory) -> Path:
    """Weights of a model that was not trained on conversations."""
    return save_model(tmp_path_factory.mktemp("base"), opinionated(VOCAB_SIZE, CONTEXT), packed)


@pytest.fixture(scope="module")
def data(packed, tmp_path_factory) -> Path:
    """Prepared conversations: questions with short and with long answers."""
    folder, lines = tmp_path_factory.mktemp("chat"), []
    for i in range(200):
        answer = f"{i + 1}" if i % 3 else "; ".join(str(i + j) for j in range(i % 7 + 1))
        turns = [("user", f"{i} + 1 ="), ("assistant", answer)]
        turns += [("user", "?"), ("assistant", "yes")] if i % 5 == 0 else []
        messages = [{"role": role, "content": content} for role, content in turns]
        lines.append(json.dumps({"messages": messages}) + "\n")
    (folder / "chat.jsonl").write_text("".join(lines), encoding="utf-8")
    how = {"kind": "conversations", "vocab_size": None, "tokenizer": str(packed)}
    return pack(folder / "chat.jsonl", folder / "prepared", val_fraction=0.2, **how)


@pytest.fixture(scope="module")
def sft(base, data):
    """Fine-tunes a model into the run folder `path`."""

    def sft(engine: str, processes: int, path: Path, flags: str, init_from: Path = base):
        flags = f"{FLAGS} --init_from {init_from} {flags}"
        return train(launch_command(engine, processes, SFT), processes, data, path, flags)

    return sft


def test_answers_get_likelier_and_the_log_has_the_loss_before_training(sft, tmp_path):
    tuned = sft("plain", 1, tmp_path / "run", "--batch_size 8 --epochs 4")
    before, *_, after = tuned.rows("val_loss")
    assert before["step"] == 0
    assert after["val_loss"] < before["val_loss"] - 1
    assert f"step 0/{after['step']}  validation loss {before['val_loss']:.4f}" in tuned.out
    assert f"scripts.chat {tuned.path}" in tuned.out
    assert "conversations within " in tuned.out
    assert "packed into " in tuned.out
    first = tuned.samples()[0]
    assert first["step"] == 0
    assert first["prompt"].startswith("user\n")
    assert first["prompt"].endswith("assistant\n")
    assert (tuned.path / "weights" / "chat_template.jinja").is_file()


ADAPTERS = "--lora_dim 4 --only_optimize_lora"
MUON = f"{ADAPTERS} --optimizer muon"


@pytest.fixture(scope="module")
def reference(sft, tmp_path_factory):
    """Returns the run with the flags `more` and one micro-batch per step; launches it only once."""
    out_dir, flags = tmp_path_factory.mktemp("reference"), "--max_steps 6 --batch_size 8"
    return cache(lambda more: sft("plain", 1, out_dir / more, f"{flags} {more}"))


@pytest.mark.parametrize(
    ("engine", "batch_size", "accumulation", "more"),
    [
        ("ddp", 1, 4, ADAPTERS),
        ("zero1", 4, 1, ADAPTERS),
        ("zero2", 1, 4, MUON),
        ("configs/zero3.yaml", 2, 2, ADAPTERS),
    ],
)
def test_tokens_of_answers_weigh_the_same_on_every_engine(
    sft, reference, tmp_path, engine, batch_size, accumulation, more
):
    """Losses and gradient norms of adapters equal those of one micro-batch in one process."""
    expected = reference(more)
    flags = f"--max_steps 6 --batch_size {batch_size} --accumulation_steps {accumulation} {more}"
    tuned = sft(engine, 2, tmp_path / "run", flags)
    # Newton-Schulz iterations enlarge the smallest singular values and their rounding errors.
    tolerance = 1e-3 if more == MUON else 1e-5
    for key in ("loss", "grad_norm"):
        assert tuned.column(key) == pytest.approx(expected.column(key), rel=tolerance, abs=1e-5)
    ours, theirs = (run.rows("val_loss")[-1] for run in (tuned, expected))
    assert ours["val_samples"] == theirs["val_samples"]
    assert ours["val_loss"] == pytest.approx(theirs["val_loss"], abs=10 * tolerance)


def test_the_first_loss_is_that_of_conversations_each_read_alone(reference, base, data):
    model, losses = load_trained(str(base)).model, []
    rows = ConversationRows(data, "train", CONTEXT)
    for i in next(iter(MicroBatchSampler(len(rows), 8, seed=SFTArguments.seed))):
        tokens, targets, starts = rows[i]
        lengths = starts.unique(return_counts=True)[1].tolist()
        for some in zip(tokens.split(lengths), targets.split(lengths), strict=True):
            losses.append(model(*(x[None] for x in some), "none").loss.flatten())
    losses = torch.cat(losses)
    assert len(losses) == 8 * CONTEXT
    mean = losses.sum().item() / int((losses != 0).sum())
    assert reference(ADAPTERS).column("loss")[0] == pytest.approx(mean, rel=1e-6)


LORA = f" {ADAPTERS} --dropout 0.1"
LORA_AND_OTHERS = " --lora_dim 4 --lora_alpha 32 --dtype bfloat16"


@pytest.mark.parametrize(
    ("engine", "more"), [("zero2", LORA), ("configs/zero3.yaml", LORA_AND_OTHERS)]
)
def test_a_run_resumes_to_the_bit_without_its_source(sft, base, tmp_path, engine, more):
    start = Path(shutil.copytree(base, tmp_path / "base"))
    flags = f"--max_steps 6 --save_interval 3 --batch_size 4 --resume auto{more}"
    whole = sft(engine, 2, tmp_path / "whole", flags, start)
    assert "a new run starts" in whole.out
    stopped = whole.stopped_after(3, tmp_path / "stopped")
    for name in ("settings.json", "tokenizer.model"):
        shutil.copy(whole.path / name, stopped)
    shutil.copytree(whole.path / "base", stopped / "base")
    check_parts(whole, base, only_lora="--only" in more)
    shutil.rmtree(start)
    resumed = sft(engine, 2, stopped, flags, start)
    assert "starts from: step-00000003" in resumed.out
    assert resumed.column("loss") == whole.column("loss")
    assert resumed.ends_as(whole)


def check_parts(run: Trained, base: Path, only_lora: bool) -> None:
    """Check the files of a run with adapters: base/, the last checkpoint and weights/."""
    begun, kept, left, under_way = (
        dict(load_trained(str(path)).model.named_parameters())
        for path in (base, run.path / "base", run.path, run.checkpoint())
    )
    alpha = 16 if only_lora else 32
    lora = LoRA(4, alpha, "layers", only_lora)
    merged = merged_weights(ChainMap(run.tensors(), begun), lora)
    for name in begun:
        assert torch.equal(kept[name], begun[name])
        assert torch.equal(left[name], merged[name])
        assert torch.equal(left[name], under_way[name])
    changed = {name for name in begun if not torch.equal(left[name], begun[name])}
    assert changed == {f"{name.rpartition('.')[0]}.weight" for name in run.tensors()}
    trained = sum(tensor.numel() for tensor in run.tensors().values())
    said = f"LoRA of dim 4 and alpha {alpha:g} in 'layers'; {trained:,} parameters"
    assert said in run.out
