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

OUT = Path("out/benchmarks/head_to_head")
# Its default model and batch (768 wide, 8 layers, 32 × 8) end no step per minute on two cores.
MINIMIND = "--hidden_size 192 --num_hidden_layers 4 --batch_size 16 --accumulation_steps 1"
MINIMIND_SAVES = 20  # steps
# nanoGPT's README, for a laptop without a GPU.
NANOGPT = (
    "--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 "
    "--n_layer=4 --n_head=4 --n_embd=128 --dropout=0.0"
)


@dataclass
class Reader:
    """A trained model as the scorer asks it."""

    logits: Callable[[Tensor], Tensor]  # ids (1, T) → (1, T, vocabulary)
    encode: Callable[[str], list[int]]
    start: int  # the id before a document
    context: int  # ids that it was trained to read


@dataclass
class Contender:
    name: str
    folder: Path  # its checkout
    command: Callable[[int], list[str]]  # how many steps → what its user types there
    saves: str  # pattern of the files that say that weights have been saved, in `folder`
    read: Callable[[Path], Reader]  # a copy of such a file, or for ours the file's folder
    where: str = "."  # the command's folder in `folder`
    fits: bool = False  # whether it is told how many steps the time allows
    curve: list[tuple[float, float]] = field(default_factory=list)  # (seconds, bits per byte)


def write_jsonl(path: Path, texts: list[str]) -> None:
    rows = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    path.write_text("".join(rows), encoding="utf-8")


def ours(text: Path) -> Contender:
    folder = OUT / "ours"
    run("git", "clone", "--quiet", str(REPOSITORY), str(folder))

    def read(state: Path) -> Reader:
        trained = load_trained(str(state.parent))
        model, tokenizer = trained.model, trained.tokenizer
        context = model.config.max_seq_len
        return Reader(lambda ids: model(ids).logits, tokenizer.encode, tokenizer.bos_id, context)

    # Saves more often than by default, for the curve.
    more = ["--run_name", "race", "--save_interval", "100", "--keep_last", "0"]
    command = ["env", f"DATA={text}", "bash", "run_accelerate.sh", *more]
    saves = "out/runs/race/checkpoints/step-????????/state.json"
    return Contender("this project", folder, lambda _: command, saves, read)


def minimind(checkout: Path, train: list[str]) -> Contender:
    """All of the text, as its users give it: on the way down to a tenth of its learning rate it
    would learn less in this time."""
    folder = copy(checkout, OUT / "minimind")
    write_jsonl(folder / "dataset/train.jsonl", train)

    def command(steps: int) -> list[str]:
        words = [*python("train_pretrain.py"), *MINIMIND.split(), "--device", "cpu"]
        words += ["--epochs", "1", "--save_interval", str(MINIMIND_SAVES)]
        return [*words, "--log_interval", "10", "--data_path", "../dataset/train.jsonl"]

    def read(file: Path) -> Reader:
        from transformers import AutoTokenizer

        module = load_module(folder / "model/model_minimind.py")
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        width, layers = (int(word) for word in MINIMIND.split()[1:4:2])
        config = module.MiniMindConfig(hidden_size=width, num_hidden_layers=layers)
        model = module.MiniMindForCausalLM(config)
        load(model, torch.load(file, map_location="cpu"))

        def encode(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False).input_ids

        return Reader(lambda ids: model(ids).logits, encode, tokenizer.bos_token_id, 340)

    saves = "checkpoints/pretrain_???.pth"
    return Contender("MiniMind", folder, command, saves, read, where="trainer")


def nanogpt(checkout: Path, train: list[str], held_out: list[str]) -> Contender:
    """By characters, as its exercise for small machines. Its vocabulary is that of all the text,
    of which it trains on the first nine tenths: of what is not held out, nearly everything."""
    folder = copy(checkout, OUT / "nanogpt")
    data = folder / "data/shakespeare_char"
    text = "\n\n".join(train + held_out)
    (data / "input.txt").write_text(text.replace("\r", ""), encoding="utf-8", newline="")

    def command(steps: int) -> list[str]:
        steps = max(10, steps // 10 * 10)
        words = [*python("train.py"), "config/train_shakespeare_char.py", *NANOGPT.split()]
        words += [f"--max_iters={steps}", f"--lr_decay_iters={steps}"]
        train_it = " ".join([*words, f"--eval_interval={steps // 10}"])
        prepare = " ".join(python("data/shakespeare_char/prepare.py"))
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

    saves = "out-shakespeare-char/ckpt.pt"
    return Contender("nanoGPT", folder, command, saves, read, fits=True)


def copy(checkout: Path, to: Path) -> Path:
    """A checkout of its own: what a run writes does not go into the user's."""
    ignored = shutil.ignore_patterns(".git", "out*", "checkpoints")
    return shutil.copytree(checkout, to, ignore=ignored)


def python(script: str) -> list[str]:
    return [sys.executable, "-u", script]


def load_module(path: Path):
    """A file of another project, whatever else here has its name."""
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def load(model: nn.Module, weights: dict[str, Tensor]) -> None:
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    model.eval()


def run(*words: str) -> None:
    """Raises UsageError: it failed."""
    ended = subprocess.run(words, capture_output=True, text=True)
    if ended.returncode:
        raise UsageError(f"{' '.join(words)}: {ended.stderr.strip()[-300:]}")
