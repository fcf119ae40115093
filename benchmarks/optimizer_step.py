"""What Muon costs: a training step with it and one with AdamW, in turns in one process.

    python -m benchmarks.optimizer_step --dim 192 --n_layers 4 --n_heads 4 --max_seq_len 256 \
        --batch_size 32

Runs without engine, on the CPU. Its flags are the training script's, as far as they matter here.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import date
from types import SimpleNamespace

import torch

from benchmarks.machine import cpu_name
from benchmarks.work import DTYPES, VOCAB_SIZE
from common.errors import UsageError, one_line_errors
from common.parser import OneLineParser
from model import ConfigError, LMConfig, Transformer
from training.arguments import OPTIMIZERS, parse_arguments
from training.engine.compilation import compile_blocks, obstacle
from training.engine.cpu_settings import keep_freed_memory
from training.optimizer import build_optimizer

PROGRAM = "benchmarks.optimizer_step"
WARMUP = 3
MODEL = ("dim", "n_layers", "n_heads", "n_kv_heads", "max_seq_len", "batch_size")


def main(argv: list[str] | None = None) -> None:
    with one_line_errors(PROGRAM, UsageError, ConfigError):
        options = parse_options(argv)
        keep_freed_memory()
        steps = {name: training_step(name, options) for name in OPTIMIZERS}
        seconds = measure(steps, options.rounds)
    ratio = statistics.median(
        muon[0] / adamw[0] for muon, adamw in zip(seconds["muon"], seconds["adamw"], strict=True)
    )
    print(
        f"{date.today()}, {cpu_name()}, torch {torch.__version__}, {options.rounds} rounds, medians"
    )
    for name, rounds in seconds.items():
        whole, update = (statistics.median(times) for times in zip(*rounds, strict=True))
        print(f"{name}: {1000 * whole:.1f} ms per step, {1000 * update:.1f} ms of it the update")
    print(f"a step with Muon takes {ratio:.3f} as long as one with AdamW")


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """The flags, checked.

    Raises:
        UsageError, ConfigError: a value that cannot work.
    """
    parser = OneLineParser(prog=PROGRAM, description=__doc__.split("\n")[0], allow_abbrev=False)
    defaults, _ = parse_arguments([])
    for name in MODEL:
        value = (vars(defaults) | LMConfig().to_dict())[name]
        parser.add_argument(f"--{name}", type=int, default=value, help=f"(default: {value})")
    add = parser.add_argument
    add("--dtype", choices=DTYPES, default=defaults.dtype, help=f"(default: {defaults.dtype})")
    add("--compile", choices=("on", "off"), default="on", help="torch.compile (default: on)")
    add("--rounds", type=int, default=25, help="steps of each optimizer (default: 25)")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        raise UsageError(f"--rounds must be at least 1, not {options.rounds}")
    parse_arguments(training_words(options))  # a shape that cannot work
    if options.compile == "on" and (reason := obstacle(torch.device("cpu"))):
        raise UsageError(f"cannot compile: {reason}; pass --compile off")
    return options


def training_words(options: argparse.Namespace) -> list[str]:
    """The same as flags of the training script."""
    names = (*MODEL, "dtype", "compile")
    return [word for name in names for word in (f"--{name}", str(getattr(options, name)))]


def training_step(
    optimizer_name: str, options: argparse.Namespace
) -> Callable[[], tuple[float, float]]:
    """A function that takes one step and returns its seconds, whole and of the update."""
    args, model_settings = parse_arguments(
        [*training_words(options), "--optimizer", optimizer_name]
    )
    torch.manual_seed(args.seed)
    config = LMConfig(**model_settings | {"vocab_size": VOCAB_SIZE})
    model = Transformer(config)
    if args.compile == "on":
        compile_blocks(model)
    no_engine = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=None))
    optimizer = build_optimizer(model, args, no_engine)
    text = torch.randint(VOCAB_SIZE, (args.batch_size, config.max_seq_len + 1))
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def step() -> tuple[float, float]:
        started = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bfloat16"):
            loss = model(tokens, targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip or float("inf"))
        before = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        ended = time.perf_counter()
        return ended - started, ended - before

    for _ in range(WARMUP):
        step()
    return step


def measure(steps: dict[str, Callable], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Every step in turn, so that what disturbs the machine disturbs all of them."""
    seconds = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(step())
    return seconds


if __name__ == "__main__":
    main()
