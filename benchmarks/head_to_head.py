"""Compare bits per byte of held-out documents after the same time: this project's first command,
nanoGPT and MiniMind (which needs the packages requests and datasets).

    python -m benchmarks.head_to_head --data poems.jsonl --nanogpt ../nanoGPT --minimind ../minimind

Every 11th document is held out. The programs train on the others, one after the other, in float32
on the CPU. The cores must be free. First, `bash run_accelerate.sh` runs in a new clone of this
repository, without uncommitted changes. Its time, from the command to the end, is the limit for
the other programs, including the time to prepare text. A program that takes longer is ended, and
the model that it saved last is scored. nanoGPT runs with the flags that its README gives for a
laptop. Short trials decide its number of steps, so that its learning-rate schedule ends with its
run. MiniMind trains a smaller model than its default one, which is too slow for a few cores.

Bits per byte are those of the documents' text, without the markers between documents. Each model
reads its own tokens, in windows as long as in its training.
"""

import importlib.util
import json
import math
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import REPOSITORY
from benchmarks.cli import clean_environment, heading, new_parser, say, table
from benchmarks.processes import adopt_orphans, end_all
from lm.common.errors import UsageError, one_line_errors, stop_in_order
from lm.data.corpus import parse, read_records
from lm.storage.weights import load_trained

PROGRAM = "benchmarks.head_to_head"
OUT = Path("out/benchmarks/head_to_head").absolute()
TRAIN = OUT / "train.jsonl"
HELD_OUT = 11  # every HELD_OUT-th document is held out
TRIALS = 20, 200  # steps of nanoGPT's trials
SHARE = 0.95  # share of the limit that is planned for nanoGPT, because speed varies
# On a CPU, nanoGPT and MiniMind compute in float32 with any --dtype.
NANOGPT = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1"
    " --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --dropout=0.0"
    " --dtype=float32"
)
MINIMIND = "--device cpu --batch_size 16 --accumulation_steps 1 --epochs 1 --save_interval 5"
HIDDEN_SIZE, LAYERS = 192, 4  # of MiniMind's model


class Reader(NamedTuple):
    """A trained model and its tokenizer."""

    steps: int  # optimizer steps of its training
    context: int  # the largest number of ids that the model reads
    start: list[int]  # the ids before a document
    encode: Callable[[str], list[int]]
    logits: Callable[[Tensor], Tensor]  # ids (1, T) → (1, T, vocab_size)


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    with one_line_errors(PROGRAM, UsageError, OSError):
        parser = new_parser(PROGRAM, __doc__)
        add = parser.add_argument
        add("--data", required=True, help='.jsonl, a document per line: {"text": "..."}')
        add("--nanogpt", type=Path, required=True, help="a checkout of nanoGPT")
        add("--minimind", type=Path, required=True, help="a checkout of MiniMind")
        add("--minutes", type=int, default=4, help="MINUTES for run_accelerate.sh")
        args = parser.parse_args(argv)
        train, held_out = split(args.data)
        adopt_orphans()
        shutil.rmtree(OUT, ignore_errors=True)
        earlier = shutil.ignore_patterns(".git", "out*", "checkpoints")  # results of earlier runs
        shutil.copytree(args.nanogpt, OUT / "nanogpt", ignore=earlier)
        shutil.copytree(args.minimind, OUT / "minimind", ignore=earlier)
        lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in train)
        TRAIN.write_text("".join(lines), encoding="utf-8")
        python = quote(sys.executable)
        limit, ours = run_ours(args.minutes)
        results = {"`bash run_accelerate.sh`": (limit, ours)}
        results["nanoGPT"] = run_nanogpt(python, train, held_out, limit)
        results["MiniMind"] = run_minimind(python, limit)
        rows = []
        for name, (seconds, model) in results.items():
            row = {"": name, "seconds": f"{seconds:.0f}", "steps": f"{model.steps:,}"}
            rows.append(row | {"bits per byte": f"{bits_per_byte(model, held_out):.3f}"})
        n_bytes = sum(len(text.encode()) for text in held_out)
        scored = f"Scored: {len(held_out):,} documents, {n_bytes:,} bytes."
        print(f"{heading(PROGRAM, argv)}\n\n{scored}\n\n{table(rows)}")


def split(data: str) -> tuple[list[str], list[str]]:
    """Return the texts to train on and the held-out texts, without carriage returns, which nanoGPT
    cannot read. Raises UsageError if the file is wrong or has too few documents."""
    texts = [parse(record).replace("\r", "") for record in read_records([data])]
    texts = [text for text in texts if text]
    if len(texts) < HELD_OUT:
        raise UsageError(f"{data}: fewer than {HELD_OUT} documents")
    return [t for i, t in enumerate(texts, 1) if i % HELD_OUT], texts[HELD_OUT - 1 :: HELD_OUT]


def timed(name: str, command: str, folder: Path, limit: float | None = None) -> float:
    """Run a command of the shell for at most `limit` seconds. Return the seconds. Raises UsageError
    if the command fails."""
    log = OUT / f"{name}.log"
    say(f"{name}: output goes to {log}")
    words = ["bash", "-c", command]
    # MiniMind has a package `model`, too.
    environment = clean_environment() | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ""}
    began = time.monotonic()
    try:
        with open(log, "w") as to:
            ended = subprocess.run(
                words, stdout=to, stderr=to, cwd=folder, env=environment, timeout=limit
            )
        seconds = time.monotonic() - began
    except subprocess.TimeoutExpired:
        return limit
    finally:
        end_all()
    if ended.returncode:
        raise UsageError(f"{name} failed: see {log}")
    return seconds


def run_ours(minutes: int) -> tuple[float, Reader]:
    """Return the seconds and the model of this project's first command."""
    timed("clone", f"git clone --quiet {quote(str(REPOSITORY))} ours", OUT)
    inputs = f"MINUTES={minutes} DATA={quote(str(TRAIN))} PYTHON={quote(sys.executable)}"
    command = f"{inputs} bash run_accelerate.sh --dtype float32 --run_name ours"
    seconds = timed("ours", command, OUT / "ours")
    run = OUT / "ours/out/runs/ours"
    trained = load_trained(str(run))
    model, tokenizer = trained.model, trained.tokenizer
    metrics = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return seconds, Reader(
        steps=json.loads(metrics[-1])["step"],
        context=model.config.max_seq_len,
        start=[tokenizer.bos_id],
        encode=tokenizer.encode,
        logits=lambda ids: model(ids).logits,
    )


def run_nanogpt(python: str, train: list, held_out: list, limit: float) -> tuple[float, Reader]:
    """Return the seconds and the model of nanoGPT, which reads characters.

    nanoGPT trains on the first nine tenths of its text. On the rest it validates, to save the best
    of four models. So the held-out documents are at the end of the text. Raises UsageError if they
    are more than a tenth of it.
    """
    folder, between = OUT / "nanogpt", "\n\n"
    text = between.join(train + held_out)
    if 10 * len(between.join(held_out)) > len(text):
        raise UsageError("the held-out documents are more than a tenth of the text")
    data = folder / "data/shakespeare_char"
    (data / "input.txt").write_text(text, encoding="utf-8", newline="")

    def run(steps: int, most: float | None = None) -> float:
        # A trial validates and saves as often as the full run: four times.
        flags = f"--max_iters={steps} --lr_decay_iters={steps} --eval_interval={steps // 4}"
        parts = "rm -rf out-*", f"{python} data/shakespeare_char/prepare.py"
        command = " && ".join([*parts, f"{python} -u train.py {NANOGPT} {flags}"])
        return timed("nanogpt", command, folder, most)

    seconds = run(affordable_steps(run, limit), limit)
    saved = torch.load(folder / "out-shakespeare-char/ckpt.pt", weights_only=False)
    module = load_module(folder / "model.py")
    with redirect_stdout(sys.stderr):  # it prints its number of parameters
        model = module.GPT(module.GPTConfig(**saved["model_args"])).eval()
    model.load_state_dict(saved["model"])
    ids_of = pickle.loads((data / "meta.pkl").read_bytes())["stoi"]
    return seconds, Reader(
        steps=saved["iter_num"],
        context=model.config.block_size,
        start=[ids_of[character] for character in between],
        encode=lambda text: [ids_of[character] for character in text],
        logits=lambda ids: model(ids, ids)[0],  # with targets, because it needs them for all logits
    )


def affordable_steps(run: Callable[[int], float], limit: float) -> int:
    """Return how many steps, a multiple of 4, fit into `limit` seconds. `run` runs some steps and
    returns the seconds. Raises UsageError if other programs slow down the trials."""
    few, more = TRIALS
    short, long = run(few), run(more)
    if long <= short:
        raise UsageError(f"{more} steps of nanoGPT took no longer than {few}: are the cores free?")
    step = (long - short) / (more - few)
    return max(few, few + int((SHARE * limit - short) / step)) // 4 * 4


def run_minimind(python: str, limit: float) -> tuple[float, Reader]:
    """Return the seconds and the model of MiniMind, which saves its weights in float16."""
    from transformers import AutoTokenizer

    folder = OUT / "minimind"
    flags = f"{MINIMIND} --hidden_size {HIDDEN_SIZE} --num_hidden_layers {LAYERS}"
    command = f"{python} -u train_pretrain.py {flags} --data_path {quote(str(TRAIN))}"
    seconds = timed("minimind", command, folder / "trainer", limit)
    saved = torch.load(folder / f"checkpoints/pretrain_{HIDDEN_SIZE}_resume.pth")
    module = load_module(folder / "model/model_minimind.py")
    config = module.MiniMindConfig(hidden_size=HIDDEN_SIZE, num_hidden_layers=LAYERS)
    model = module.MiniMindForCausalLM(config).eval()  # in float32
    model.load_state_dict(saved["model"])
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    return seconds, Reader(
        steps=saved["step"],
        context=340,  # the default of its --max_seq_len
        start=[tokenizer.bos_token_id],
        encode=lambda text: tokenizer(text, add_special_tokens=False).input_ids,
        logits=lambda ids: model(ids).logits,
    )


def load_module(path: Path):
    """Import a file of another project."""
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # for dataclasses
    spec.loader.exec_module(module)
    return module


@torch.inference_mode()
def bits_per_byte(model: Reader, documents: list[str]) -> float:
    """Score documents in windows of the model's context. Each window begins half a context after
    the previous one, and scores only the ids that the previous one did not score."""
    nats, stride = 0.0, model.context // 2
    for text in documents:
        ids = model.start + model.encode(text)
        done = len(model.start)  # the ids before this index are scored, or are not text
        for begin in range(0, len(ids), stride):
            end = min(begin + model.context, len(ids) - 1)
            if done <= end:
                logits = model.logits(torch.tensor([ids[begin:end]]))[0, done - 1 - begin :]
                targets = torch.tensor(ids[done : end + 1])
                nats += nn.functional.cross_entropy(logits, targets, reduction="sum").item()
                done = end + 1
    return nats / math.log(2) / sum(len(text.encode()) for text in documents)


if __name__ == "__main__":
    main()
