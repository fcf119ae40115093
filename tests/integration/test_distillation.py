"""train_distillation_accelerate.py: several engines give the losses of a plain PyTorch loop, and a
resumed run equals an uninterrupted run to the bit."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import REPOSITORY, VOCAB_SIZE, Trained, launch_command, pack, train
from small_model import opinionated, save_model

from lm.data.conversation_set import ConversationRows
from lm.data.dataset import PackedDataset
from lm.data.order import MicroBatchSampler
from lm.formats.portable import load_portable
from lm.storage.weights import load_trained
from lm.training.arguments import TrainingArguments
from lm.training.distillation import distillation_loss
from lm.training.optimizer import parameter_groups
from model import IGNORE_INDEX, LMConfig, Transformer
from model.experts import load_balance

pytestmark = pytest.mark.slow

DISTIL = "train_distillation_accelerate.py"
SHAPE = {"dim": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32}  # as in TINY
STEPS, BATCH, ALPHA, TEMPERATURE, RATE = 4, 8, 0.3, 2.0, 1e-2
FLAGS = (
    f"--dtype float32 --lr_schedule constant --warmup_steps 0 --learning_rate {RATE} "
    f"--max_steps {STEPS} --alpha {ALPHA} --temperature {TEMPERATURE}"
)
PARTS = ("loss", "hard_loss", "soft_loss", "agreement")


@pytest.fixture(scope="module")
def sources(packed, tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Maps "text" and each of PAIRS to the data and the weights of the teacher, which mostly
    predicts the current token again, or has experts."""
    folder = tmp_path_factory.mktemp("sources")
    rows = ({"prompt": f"{i} + 1 =", "response": str(i + 1) * (i % 4 + 1)} for i in range(120))
    (folder / "chat.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    how = {"kind": "conversations", "vocab_size": None, "tokenizer": str(packed)}
    answers = pack(folder / "chat.jsonl", folder / "packed", val_fraction=0.2, **how)
    teacher = opinionated(VOCAB_SIZE, SHAPE["max_seq_len"])
    teacher.norm.weight.data.fill_(2.0)
    torch.manual_seed(3)
    moe = LMConfig(**SHAPE, vocab_size=VOCAB_SIZE, use_moe=True, num_experts_per_tok=2)
    experts = Transformer(moe)
    experts.tok_embeddings.weight.data.mul_(10)
    one, other = (
        save_model(folder / name, model, packed)
        for name, model in (("teacher", teacher), ("experts", experts))
    )
    return dict.fromkeys(("text", "reverse"), (packed, one)) | {
        "answers": (answers, one),
        "experts": (packed, other),
    }


def by_hand(what: str, data: Path, teacher: Path) -> list[dict]:
    """Train by plain PyTorch in one process, one micro-batch per step; return the log rows."""
    read = ConversationRows if what == "answers" else PackedDataset
    data, teacher = read(data, "train", SHAPE["max_seq_len"]), load_portable(teacher)
    kl, use_moe = "reverse" if what == "reverse" else "forward", what == "experts"
    how = SimpleNamespace(alpha=ALPHA, temperature=TEMPERATURE, kl=kl)
    torch.manual_seed(TrainingArguments.seed)
    student = Transformer(LMConfig(**SHAPE, vocab_size=data.vocab_size, use_moe=use_moe))
    groups = parameter_groups(student, TrainingArguments.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    place = {"rank": 0, "world_size": 1, "seed": TrainingArguments.seed, "start": 0}
    batches = MicroBatchSampler(len(data), BATCH, **place)
    rows = []
    for _, samples in zip(range(STEPS), batches, strict=False):
        tokens, targets, *starts = torch.utils.data.default_collate([data[i] for i in samples])
        counts = targets != IGNORE_INDEX
        starts = starts[0] if starts else None
        out = student(tokens, starts=starts)
        ours, wanted = out.logits[counts], targets[counts]  # (targets, vocab_size)
        with torch.no_grad():
            theirs = teacher(tokens, starts=starts).logits[counts]
        found = distillation_loss(ours[None], theirs[None], wanted[None], how)
        balance = 0.0
        if use_moe:
            balance = 0.1 * load_balance(out.routing, counts, 1)["balancing_loss"]
        (found[0] + balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), TrainingArguments.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        values = zip(PARTS, found, strict=True)
        rows.append({name: value.item() for name, value in values} | {"grad_norm": norm.item()})
    return rows


# What differs from a run with forward KL on text → the student's engine, --batch_size,
# --accumulation_steps, and flags. Each run has a global batch of 8. ZeRO-3 divides the teacher.
PAIRS = {
    "answers": ("zero2", 1, 4, ""),
    "reverse": ("ddp", 2, 2, "--kl reverse"),
    "experts": ("configs/zero3.yaml", 2, 2, "--use_moe"),
}
IN_BF16 = "--dtype bfloat16 --dropout 0.1 --log_interval 4 --save_interval 3 --max_steps 6"


@pytest.fixture(scope="module")
def distil(sources, tmp_path_factory):
    """Trains the student of a pair in PAIRS on two processes, by default in a new folder."""
    folder = tmp_path_factory.mktemp("pairs")
    file = json.loads((REPOSITORY / "configs" / "zero3_inference.json").read_text())
    zero = file["zero_optimization"]
    # With the limits in our file ZeRO-3 would never release the weights of such a small teacher.
    zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1000}
    (folder / "divided.json").write_text(json.dumps(file))

    def distil(what: str, path: Path | None = None, more: str = "") -> Trained:
        (student, batch_size, accumulation, own), (data, teacher) = PAIRS[what], sources[what]
        flags = f"{FLAGS} --teacher {teacher} --batch_size {batch_size} {own} {more}"
        flags += f" --accumulation_steps {accumulation} --teacher_config {folder}/divided.json"
        return train(launch_command(student, 2, DISTIL), 2, data, path or folder / what, flags)

    return distil


def assert_the_same(run: Trained, expected: list[dict]) -> None:
    for name in (*PARTS, "grad_norm"):
        wanted = [row[name] for row in expected]
        assert run.column(name) == pytest.approx(wanted, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("what", PAIRS)
def test_losses_equal_those_of_a_plain_loop(distil, sources, what):
    run = distil(what)
    assert_the_same(run, by_hand(what, *sources[what]))
    assert re.search("teacher: .*, ZeRO-3", run.out)


def test_a_resumed_run_is_equal_to_the_bit(distil, tmp_path):
    """The run has dropout, and it stops between two log lines."""
    whole = distil("answers", tmp_path / "whole", IN_BF16)
    path = whole.stopped_after(3, tmp_path / "stopped")
    resumed = distil("answers", path, f"{IN_BF16} --resume {path}")
    assert resumed.repeatable() == whole.repeatable()
    assert resumed.ends_as(whole)


def test_one_process_equals_a_plain_loop_and_saves_the_student(sources, tmp_path):
    data, teacher = sources["text"]
    flags = f"{FLAGS} --teacher {teacher} --batch_size {BATCH}"
    distilled = train([sys.executable, DISTIL], 1, data, tmp_path / "run", flags)
    assert_the_same(distilled, by_hand("text", data, teacher))
    student = load_trained(str(distilled.path)).model
    assert student.norm.weight.mean().item() == pytest.approx(1, abs=0.1)  # the teacher has 2
    row = distilled.rows()[-1]
    said = "  ".join(f"{name} {row[name]:.4f}" for name in PARTS)
    assert f"step {STEPS}/{STEPS}  {said}  lr " in distilled.out
    (line,) = [line for line in distilled.out.splitlines() if " teacher: " in line]
    n = sum(p.numel() for p in load_portable(teacher).parameters())
    assert f"{teacher}: {n / 1e6:.2f} million (dim 32, 2 layers" in line
    assert line.endswith("whole on each process")
