"""train_distillation_accelerate.py: several engines give the losses of a plain PyTorch loop, and a
resumed run equals an uninterrupted run to the bit."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import REPOSITORY, Trained, launch_command, pack, train
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
def teacher(packed, tmp_path_factory) -> Path:
    """Weights of a model that mostly predicts the current token again."""
    model = opinionated(400, SHAPE["max_seq_len"])
    model.norm.weight.data.fill_(2.0)
    return save_model(tmp_path_factory.mktemp("teacher") / "weights", model, packed)


@pytest.fixture(scope="module")
def teacher_of(packed, teacher, tmp_path_factory):
    """Returns the teacher's weights for a pair in PAIRS: `teacher`, or a model with experts."""
    torch.manual_seed(3)
    model = Transformer(LMConfig(**SHAPE, vocab_size=400, use_moe=True, num_experts_per_tok=2))
    model.tok_embeddings.weight.data.mul_(10)
    experts = save_model(tmp_path_factory.mktemp("experts") / "weights", model, packed)
    return lambda name: experts if PAIRS[name][-1] == "experts" else teacher


@pytest.fixture(scope="module")
def conversations(packed, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    rows = ({"prompt": f"{i} + 1 =", "response": str(i + 1) * (i % 4 + 1)} for i in range(120))
    (folder / "chat.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    how = {"kind": "conversations", "vocab_size": None, "tokenizer": str(packed)}
    return pack(folder / "chat.jsonl", folder / "packed", val_fraction=0.2, **how)


def by_hand(
    data: PackedDataset | ConversationRows,
    teacher: Transformer,
    kl: str = "forward",
    use_moe: bool = False,
) -> list[dict]:
    """Train by plain PyTorch in one process, one micro-batch per step; return the log rows."""
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


# Each run has a global batch of 8. The values are the student's engine, the teacher's DeepSpeed
# file, --batch_size, --accumulation_steps, and what differs from a run with forward KL on text.
PAIRS = {
    "ZeRO-2 and ZeRO-3": ("zero2", "divided", 1, 4, ""),
    "ZeRO-2 and ZeRO-3, answers": ("zero2", "divided", 1, 4, "answers"),
    "DDP and ZeRO-3, reverse": ("ddp", "divided", 2, 2, "reverse"),
    "ZeRO-2 and a whole teacher": ("zero2", None, 4, 1, ""),
    "ZeRO-3 twice": ("configs/zero3.yaml", "divided", 4, 1, ""),
    "ZeRO-2 and ZeRO-3, both with experts": ("zero2", "divided", 2, 2, "experts"),
}
IN_BF16 = "--dtype bfloat16 --dropout 0.1 --log_interval 4 --save_interval 3 --max_steps 6"


@pytest.fixture(scope="module")
def distil(packed, conversations, teacher_of, tmp_path_factory):
    """Trains the student of a pair in PAIRS on two processes, by default in a new folder."""
    folder = tmp_path_factory.mktemp("pairs")
    file = json.loads((REPOSITORY / "configs" / "zero3_inference.json").read_text())
    zero = file["zero_optimization"]
    # With the limits in our file ZeRO-3 would never release the weights of such a small teacher.
    zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1000}
    (folder / "divided.json").write_text(json.dumps(file))

    def distil(name: str, path: Path | None = None, more: str = "") -> Trained:
        student, config, batch_size, accumulation, what = PAIRS[name]
        flags = f"{FLAGS} --teacher {teacher_of(name)} --batch_size {batch_size} {more}"
        flags += f" --accumulation_steps {accumulation}"
        flags += f" --teacher_config {folder / config}.json" if config else ""
        flags += {"reverse": " --kl reverse", "experts": " --use_moe"}.get(what, "")
        data = conversations if what == "answers" else packed
        command = [*launch_command(student, 2)[:-1], DISTIL]
        return train(command, 2, data, path or folder / name, flags)

    return distil


@pytest.fixture(scope="module")
def expected(packed, conversations, teacher, teacher_of) -> dict[str, list[dict]]:
    model, seq_len = load_portable(teacher), SHAPE["max_seq_len"]
    text = PackedDataset(packed, "train", seq_len)
    answers = ConversationRows(conversations, "train", seq_len)
    return {
        "": by_hand(text, model),
        "reverse": by_hand(text, model, "reverse"),
        "answers": by_hand(answers, model),
        "experts": by_hand(text, load_portable(teacher_of([*PAIRS][-1])), use_moe=True),
    }


def assert_the_same(run: Trained, expected: list[dict]) -> None:
    for name in (*PARTS, "grad_norm"):
        wanted = [row[name] for row in expected]
        assert run.column(name) == pytest.approx(wanted, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("name", PAIRS)
def test_losses_equal_those_of_a_plain_loop(distil, expected, name):
    run = distil(name)
    assert_the_same(run, expected[PAIRS[name][-1]])
    where = "ZeRO-3" if PAIRS[name][1] else "whole on each process"
    assert re.search(rf"teacher: .*, {where}", run.out)


def test_a_resumed_run_is_equal_to_the_bit(distil, tmp_path):
    """The run has dropout, and it stops between two log lines."""
    pair = "ZeRO-2 and ZeRO-3"
    whole = distil(pair, tmp_path / "whole", IN_BF16)
    path = whole.stopped_after(3, tmp_path / "stopped")
    resumed = distil(pair, path, f"{IN_BF16} --resume {path}")
    assert resumed.repeatable() == whole.repeatable()
    assert resumed.ends_as(whole)


def test_one_process_equals_a_plain_loop_and_saves_the_student(packed, expected, teacher, tmp_path):
    """The process has micro-batches of 8 sequences."""
    flags = f"{FLAGS} --teacher {teacher} --batch_size {BATCH}"
    distilled = train([sys.executable, DISTIL], 1, packed, tmp_path / "run", flags)
    assert_the_same(distilled, expected[""])
    student = load_trained(str(distilled.path)).model
    assert student.norm.weight.mean().item() == pytest.approx(1, abs=0.1)  # the teacher has 2
    row = distilled.rows()[-1]
    said = "  ".join(f"{name} {row[name]:.4f}" for name in PARTS)
    assert f"step {STEPS}/{STEPS}  {said}  lr " in distilled.out
    (line,) = [line for line in distilled.out.splitlines() if " teacher: " in line]
    n = sum(p.numel() for p in load_portable(teacher).parameters())
    assert f"{teacher}: {n / 1e6:.2f} million (dim 32, 2 layers" in line
    assert line.endswith("whole on each process")
