"""Peak memory of one forward and backward pass with a large vocabulary: the loss of all logits at
once, and in chunks (model/loss.py). Each is measured in a process of its own, on a CPU.

    python -m benchmarks.large_vocabulary
"""

import argparse
import multiprocessing
import re
import time
from pathlib import Path

import torch

from benchmarks.flags import at_least, new_parser
from model import LMConfig, Transformer, loss
from training.engine.activations import activations
from training.engine.workload import Parameters, Workload

PROGRAM = "benchmarks.large_vocabulary"
# SmolLM2-135M's, with fewer of its 30 layers.
SHAPE = {"dim": 576, "n_layers": 2, "n_heads": 9, "n_kv_heads": 3, "hidden_dim": 1536}
SEQ_LEN = 512


def resident(key: str) -> int:
    """Bytes: VmRSS now, VmHWM at most since the last reset."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(re.search(rf"{key}:\s+(\d+)", status)[1])


def measure(
    vocab_size: int, batch_size: int, dtype: str, whole: bool
) -> tuple[float, float, float]:
    """Gradients included: (measured GB above what the model takes, expected, seconds)."""
    if whole:
        loss.LARGE_VOCABULARY = vocab_size
    config = LMConfig(vocab_size=vocab_size, max_seq_len=SEQ_LEN, **SHAPE)
    model, autocast = Transformer(config), dtype == "bfloat16"
    tokens = torch.randint(vocab_size, (batch_size, SEQ_LEN))
    before, started = resident("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = model(tokens, tokens).loss
    value.backward()
    seconds = time.perf_counter() - started
    parameters = Parameters.of(config)
    work = Workload(config, parameters, dtype, batch_size, 1, 1, on_cpu=True)
    held = activations(work, autocast=autocast)
    expected = held.kept + max(held.logits, held.block) + 4 * parameters.total
    return (resident("VmHWM") - before) / 1e9, expected / 1e9, seconds


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(PROGRAM, __doc__)
    parser.add_argument("--vocab_size", type=at_least(1), default=49_152)
    parser.add_argument("--batch_size", type=at_least(1), default=8, help=f"of {SEQ_LEN} tokens")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_options()
    print("precision  loss       measured, GB  expected, GB  seconds")
    for dtype in ("float32", "bfloat16"):
        for name, whole in (("whole", True), ("in chunks", False)):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                row = pool.apply(measure, (args.vocab_size, args.batch_size, dtype, whole))
            print(f"{dtype:9}  {name:9}  {row[0]:12.2f}  {row[1]:12.2f}  {row[2]:7.1f}", flush=True)


if __name__ == "__main__":
    main()
