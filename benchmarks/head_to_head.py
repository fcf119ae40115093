"""Bits per byte on held-out documents after equal wall time: this project's first command beside
MiniMind's and nanoGPT's training scripts, on the same text and the same cores, one after another.

    python -m benchmarks.head_to_head --data poems.jsonl --minimind ../minimind --nanogpt ../nanoGPT

`bash run_accelerate.sh` runs first, in a clone of its own, and its time from the command to the end
is everybody's time; preparing text and compiling count. The others run in copies of their
checkouts: nanoGPT with its README's flags for a laptop, and with as many steps as short trials say
that the time allows, so that its learning rate decays over all of it; MiniMind on all of the text,
with a model of our size, as its own does not end a step per minute on two cores. A run that takes
longer is ended, and its last save counts. Every eleventh document is held out from all three. A
character's or a token's loss is weighed by its bytes: bits per byte is the nats of all of the
documents' text, without markers between documents, over the bytes of it.
"""

import argparse
import importlib.util
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import REPOSITORY
from benchmarks.cli import at_least, clean_environment, heading, new_parser, say, table
from common.errors import UsageError, one_line_errors, stop_in_order
from evaluation.language_modelling import windows
from model import IGNORE_INDEX
from runs.weights import load_trained

PROGRAM = "benchmarks.head_to_head"
OUT = Path("out/benchmarks/head_to_head")
HELD_OUT = 11  # every so many documents
TRIAL = (20, 200)  # steps, of which the difference tells the time of one
# Its default model and batch (768 wide, 8 layers, 32 × 8) end no step per minute on two cores.
MINIMIND = {"hidden_size": 192, "num_hidden_layers": 4}
MINIMIND_FLAGS = "--batch_size 16 --accumulation_steps 1 --epochs 1 --save_interval 20"
# nanoGPT's README, for a laptop without a GPU.
NANOGPT = (
    "--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 "
    "--n_layer=4 --n_head=4 --n_embd=128 --dropout=0.0"
)
IGNORED = shutil.ignore_patterns(".git", "out*", "checkpoints")  # of a checkout that is copied


@dataclass
class Reader:
    """A trained model as the scorer asks it."""

    logits: Callable[[Tensor], Tensor]  # ids (1, T) → (1, T, vocabulary)
    encode: Callable[[str], list[int]]
    start: int  # the id before a document
    context: int  # ids that it was trained to read


@dataclass
class Racer:
    name: str
    folder: Path  # its copy of a checkout
    command: Callable[[int], list[str]]  # how many steps → what its user types there
    saves: str  # pattern of the files with weights in `folder`
    read: Callable[[Path], Reader]  # takes such a file
    where: str = "."  # the command's folder in `folder`
    fits: bool = False  # whether it is told how many steps the time allows


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    with one_line_errors(PROGRAM, UsageError):
        args = parse_options(argv)
        train, held_out = split(args.data)
        shutil.rmtree(OUT, ignore_errors=True)
        OUT.mkdir(parents=True)
        racers = prepare(args, train, held_out)
        shown = held_out[:: -(-len(held_out) // args.documents)]
        rows, limit = [], math.inf
        for racer in racers:
            steps = affordable_steps(racer, limit) if racer.fits else 0
            say(f"{racer.name}: {steps or 'its own'} steps")
            seconds, saved, weights = race(racer, steps, limit)
            limit = min(limit, seconds)  # the first one's time is everybody's
            rows.append(
                {
                    "": racer.name,
                    "seconds in all": f"{seconds:.0f}",
                    "steps": steps or "its own",
                    "last weights at, s": f"{saved:.0f}",
                    "bits per byte": f"{bits_per_byte(racer.read(weights), shown):.3f}",
                }
            )
        n_bytes = sum(len(text.encode()) for text in shown)
        print(f"{heading(PROGRAM, argv)}\n\nHeld out: {len(shown):,} documents, {n_bytes:,} bytes.")
        print(f"\n{table(rows)}")


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Raises UsageError: a folder is no checkout."""
    parser = new_parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help='.jsonl, a document per line: {"text": "..."}')
    add("--minimind", type=Path, help="a checkout of MiniMind")
    add("--nanogpt", type=Path, help="a checkout of nanoGPT")
    add("--documents", type=at_least(1), default=400, help="of those held out, how many to score")
    args = parser.parse_args(argv)
    scripts = {args.minimind: "trainer/train_pretrain.py", args.nanogpt: "train.py"}
    for folder, script in scripts.items():
        if folder and not (folder / script).is_file():
            raise UsageError(f"{folder} has no {script}")
    return args


def split(data: Path) -> tuple[list[str], list[str]]:
    """Return the texts to train on, and those held out. Raises UsageError: no such file, or another
    form."""
    try:
        lines = data.read_text(encoding="utf-8").split("\n")
        texts = [json.loads(line)["text"] for line in lines if line.strip()]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{data}: {error!r}") from error
    if len(texts) < HELD_OUT:
        raise UsageError(f"{data}: fewer than {HELD_OUT} documents")
    train = [text for i, text in enumerate(texts) if (i + 1) % HELD_OUT]
    return train, texts[HELD_OUT - 1 :: HELD_OUT]


def prepare(args: argparse.Namespace, train: list[str], held_out: list[str]) -> list[Racer]:
    """Return the racers, ours first, each in a folder of its own."""
    text, out = (OUT / "train.jsonl").resolve(), OUT.resolve()
    rows = (json.dumps({"text": each}, ensure_ascii=False) + "\n" for each in train)
    text.write_text("".join(rows), encoding="utf-8")
    found = [ours(out / "ours", text)]
    if args.minimind:
        found.append(minimind(args.minimind, out / "minimind", text))
    if args.nanogpt:
        found.append(nanogpt(args.nanogpt, out / "nanogpt", train + held_out))
    return found


def affordable_steps(racer: Racer, seconds: float) -> int:
    """Return with how many steps the run takes nearly this long, by two short trials."""
    few, more = TRIAL
    first, second = (race(racer, steps, math.inf)[0] for steps in TRIAL)
    step = max((second - first) / (more - few), 1e-6)
    startup = max(first - few * step, 0)
    return max(10, int((0.97 * seconds - startup) / step) // 10 * 10)


def race(racer: Racer, steps: int, limit: float) -> tuple[float, float, Path]:
    """Run a racer's command to the end, or for `limit` seconds.

    Returns the seconds that it took, those after which it last saved weights, and their file.
    Raises UsageError: it failed, or saved nothing.
    """
    log = OUT / f"{racer.name.replace(' ', '-')}.log"
    started, began = time.monotonic(), time.time()
    with open(log, "w") as output:
        process = subprocess.Popen(
            racer.command(steps),
            cwd=racer.folder / racer.where,
            env=clean_environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(None if limit == math.inf else limit)
        seconds = time.monotonic() - started
    finally:
        if process.poll() is None:  # run_accelerate.sh passes it on to those in another session
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    if process.returncode not in (0, -signal.SIGTERM):
        raise UsageError(f"{racer.name} failed: {log.read_text()[-500:]}")
    saves = [path for path in racer.folder.glob(racer.saves) if path.stat().st_mtime > began]
    if not saves:
        raise UsageError(f"{racer.name} saved no weights in {seconds:.0f} s: see {log}")
    newest = max(saves, key=lambda path: path.stat().st_mtime)
    return seconds, newest.stat().st_mtime - began, newest


@torch.inference_mode()
def bits_per_byte(reader: Reader, documents: list[str]) -> float:
    """Score with windows of the model's context, each beginning half of it after the one before."""
    nats = 0.0
    for text in documents:
        ids = [reader.start, *reader.encode(text)]
        for tokens, targets in windows(ids, reader.context, max(1, reader.context // 2)):
            logits = reader.logits(torch.tensor([tokens]))[0].float()
            nats += nn.functional.cross_entropy(
                logits, torch.tensor(targets), ignore_index=IGNORE_INDEX, reduction="sum"
            ).item()
    return nats / math.log(2) / sum(len(text.encode()) for text in documents)


def ours(folder: Path, text: Path) -> Racer:
    words = ["git", "clone", "--quiet", str(REPOSITORY), str(folder)]
    ended = subprocess.run(words, capture_output=True, text=True)
    if ended.returncode:
        raise UsageError(f"{' '.join(words)}: {ended.stderr.strip()[-300:]}")

    def read(weights: Path) -> Reader:
        trained = load_trained(str(weights.parent))
        model, tokenizer = trained.model, trained.tokenizer
        context = model.config.max_seq_len
        return Reader(lambda ids: model(ids).logits, tokenizer.encode, tokenizer.bos_id, context)

    command = ["env", f"DATA={text}", "bash", "run_accelerate.sh", "--run_name", "race"]
    saves = "out/runs/race/weights/*.safetensors"
    return Racer("this project", folder, lambda _: command, saves, read)


def minimind(checkout: Path, folder: Path, text: Path) -> Racer:
    """All of the text, as its users give it: with a schedule cut to the time it would learn
    less."""
    shutil.copytree(checkout, folder, ignore=IGNORED)

    def command(steps: int) -> list[str]:
        words = [sys.executable, "-u", "train_pretrain.py", *MINIMIND_FLAGS.split()]
        words += [word for name, size in MINIMIND.items() for word in (f"--{name}", str(size))]
        return [*words, "--device", "cpu", "--data_path", str(text)]

    def read(file: Path) -> Reader:
        from transformers import AutoTokenizer

        module = load_module(folder / "model/model_minimind.py")
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        model = module.MiniMindForCausalLM(module.MiniMindConfig(**MINIMIND))
        load(model, torch.load(file, map_location="cpu"))

        def encode(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False).input_ids

        return Reader(lambda ids: model(ids).logits, encode, tokenizer.bos_token_id, 340)

    saves = "checkpoints/pretrain_???.pth"
    return Racer("MiniMind", folder, command, saves, read, where="trainer")


def nanogpt(checkout: Path, folder: Path, texts: list[str]) -> Racer:
    """By characters, as its exercise for small machines.

    Args:
        texts: to train on, and held out behind them. The vocabulary is that of all; it trains on
            the first nine tenths, which is nearly everything that is not held out.
    """
    shutil.copytree(checkout, folder, ignore=IGNORED)
    data = folder / "data/shakespeare_char"
    text = "\n\n".join(texts).replace("\r", "")
    (data / "input.txt").write_text(text, encoding="utf-8", newline="")

    def command(steps: int) -> list[str]:
        steps = max(10, steps // 10 * 10)
        words = [sys.executable, "-u", "train.py", "config/train_shakespeare_char.py", NANOGPT]
        words += [f"--max_iters={steps}", f"--lr_decay_iters={steps}"]
        train_it = " ".join([*words, f"--eval_interval={steps // 10}"])
        prepare = f"{sys.executable} data/shakespeare_char/prepare.py"
        return ["bash", "-c", f"{prepare} && exec {train_it}"]

    def read(file: Path) -> Reader:
        module = load_module(folder / "model.py")
        saved = torch.load(file, map_location="cpu", weights_only=False)
        model = module.GPT(module.GPTConfig(**saved["model_args"]))
        load(model, saved["model"])
        ids_of = pickle.loads((data / "meta.pkl").read_bytes())["stoi"]

        def logits(ids: Tensor) -> Tensor:
            return model(ids, ids)[0]  # without targets it gives those of the last position alone

        def encode(text: str) -> list[int]:
            return [ids_of[char] for char in text.replace("\r", "")]

        return Reader(logits, encode, ids_of["\n"], model.config.block_size)

    return Racer("nanoGPT", folder, command, "out-shakespeare-char/ckpt.pt", read, fits=True)


def load_module(path: Path):
    """Import a file of another project, whatever else here has its name."""
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def load(model: nn.Module, weights: dict[str, Tensor]) -> None:
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    model.eval()


if __name__ == "__main__":
    main()
