"""A run known before its launch: memory of every engine, what fits, hours, bytes sent.

    python -m scripts.plan --dim 1024 --n_layers 32 --max_seq_len 1024 --batch_size 24 \
        --accumulation_steps 32 --num_processes 4 --gpu_memory 48 --device "RTX 6000 Ada"
    python -m scripts.plan ... --num_processes 8,64,1024     # who can share this global batch

Flags are those of the training script that a plan depends on, and those under "plan". Nothing is
loaded or started; neither a GPU nor weights are needed. Figures are those of
training/engine/memory.py and communication.py.
"""

import argparse
import math
import os

from common.errors import UsageError, one_line_errors
from model.config import ConfigError
from training.arguments import build_parser
from training.plan_page import describe

LARGEST = 1e18
# Of training, what a plan depends on besides the model's shape.
TRAINING_FLAGS = (
    *("accumulation_steps", "batch_size", "compile", "dtype", "gradient_checkpointing"),
    *("keep_last", "max_steps", "optimizer", "tf32"),
)


def whole_numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 0 < int(part) <= LARGEST for part in parts):
        raise argparse.ArgumentTypeError(f"whole numbers from 1 on, not {text!r}")
    return [int(part) for part in parts]


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= LARGEST:
        raise argparse.ArgumentTypeError(f"a positive number, at most {LARGEST:g}, not {text!r}")
    return value


def share(text: str) -> float:
    value = positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"a share, from 0 to 1, not {text!r}")
    return value


def parse_options(argv: list[str] | None = None) -> dict:
    """What was typed, of all flags; those of "plan" with their defaults."""
    parser = build_parser(only=TRAINING_FLAGS)
    parser.prog, parser.description = "python -m scripts.plan", __doc__
    add = parser.add_argument_group("plan").add_argument
    numbers = "processes that share the global batch, one number or several: 8,64,1024"
    add(
        "--num_processes",
        type=whole_numbers,
        default=[1],
        metavar="N",
        help=f"{numbers}; the batch is that of the first (default: 1)",
    )
    add("--vocab_size", type=int, default=6400, help="pieces of the tokenizer")
    gpu = "GiB that a process can have on its GPU (default: what is found; without a GPU, RAM)"
    add("--gpu_memory", type=positive, metavar="GIB", help=gpu)
    add("--ram", type=positive, metavar="GIB", help="of one machine (default: what is found)")
    add("--processes_per_machine", type=whole_numbers, default=[8], help="at most")
    device = "whose peak counts, as in 'H100' or 'RTX 4090' (default: the GPU that is found)"
    add("--device", metavar="NAME", help=device)
    mfu = "share of the peak that is reached, as a run's log says it; 0.4 is an assumption"
    add("--mfu", type=share, default=0.4, help=mfu)
    tokens = "to train on (default: max_steps, if given, else 20 per parameter)"
    add("--tokens", type=positive, help=tokens)
    add("--bandwidth", type=positive, default=25.0, metavar="GB/S", help="that a process can send")
    host = "between a GPU and RAM or NVMe, for offload"
    add("--host_bandwidth", type=positive, default=20.0, metavar="GB/S", help=host)
    return vars(parser.parse_args(argv))


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("plan", UsageError, ConfigError):
        options = parse_options(argv)
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would warn that it found no GPU
        print(describe(options))


if __name__ == "__main__":
    main()
