"""What Muon costs: a training step with it and one with AdamW, in turns in one process.

    python -m benchmarks.optimizer_step --dim 192 --n_layers 4 --n_heads 4 --max_seq_len 256 \
        --batch_size 32

Takes the training script's flags of model and batch. Runs without engine, on the CPU.
"""

import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch

from benchmarks.machine import cpu_name
from benchmarks.work import VOCAB_SIZE
from model import ConfigError, LMConfig, Transformer
from training.allocator import keep_freed_memory
from training.arguments import OPTIMIZERS, parse_arguments
from training.compilation import compile_blocks
from training.errors import UsageError, one_line_errors
from training.optimizer import build_optimizer

WARMUP, ROUNDS = 3, 25


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("benchmarks.optimizer_step", UsageError, ConfigError):
        argv = sys.argv[1:] if argv is None else argv
        parse_arguments(argv)  # a flag that is wrong is said before anything is built
        keep_freed_memory()
        steps = {name: training_step(name, argv) for name in OPTIMIZERS}
        seconds = measure(steps, ROUNDS)
    ratio = statistics.median(
        muon[0] / adamw[0] for muon, adamw in zip(seconds["muon"], seconds["adamw"], strict=True)
    )
    print(f"{cpu_name()}, {ROUNDS} rounds, medians")
    for name, rounds in seconds.items():
        whole, update = (statistics.median(times) for times in zip(*rounds, strict=True))
        print(f"{name}: {1000 * whole:.1f} ms per step, {1000 * update:.1f} ms of it the update")
    print(f"a step with Muon takes {ratio:.3f} as long as one with AdamW")


def training_step(optimizer_name: str, argv: list[str]) -> Callable[[], tuple[float, float]]:
    """A function that takes one step and returns its seconds, whole and of the update."""
    args, model_settings = parse_arguments([*argv, "--optimizer", optimizer_name])
    torch.manual_seed(args.seed)
    config = LMConfig(**model_settings | {"vocab_size": VOCAB_SIZE})
    model = Transformer(config)
    if args.compile != "off":
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
