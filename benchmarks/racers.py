"""Who runs in `benchmarks.head_to_head`: how each is prepared, started and read."""

import importlib.util
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import REPOSITORY
from common.errors import UsageError
from runs.weights import load_trained

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
    saves: str  # pattern in `folder` of the files that are there when weights have been saved
    read: Callable[[Path], Reader]  # takes a copy of such a file, or for ours the file itself
    where: str = "."  # the command's folder in `folder`
    fits: bool = False  # whether it is told how many steps the time allows
    curve: list[tuple[float, float]] = field(default_factory=list)  # (seconds, bits per byte)


def write_jsonl(path: Path, texts: list[str]) -> None:
    rows = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    path.write_text("".join(rows), encoding="utf-8")


def ours(folder: Path, text: Path) -> Racer:
    words = ["git", "clone", "--quiet", str(REPOSITORY), str(folder)]
    ended = subprocess.run(words, capture_output=True, text=True)
    if ended.returncode:
        raise UsageError(f"{' '.join(words)}: {ended.stderr.strip()[-300:]}")

    def read(state: Path) -> Reader:
        trained = load_trained(str(state.parent))
        model, tokenizer = trained.model, trained.tokenizer
        context = model.config.max_seq_len
        return Reader(lambda ids: model(ids).logits, tokenizer.encode, tokenizer.bos_id, context)

    # Saves more often than by default, for the curve.
    more = ["--run_name", "race", "--save_interval", "100", "--keep_last", "0"]
    command = ["env", f"DATA={text}", "bash", "run_accelerate.sh", *more]
    saves = "out/runs/race/checkpoints/step-????????/state.json"
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
