"""Peak memory of one forward and backward pass with a large vocabulary: the loss of all logits at
once, and in chunks (model/loss.py). Each is measured in a process of its own, on a CPU.

    python -m benchmarks.large_vocabulary
"""

import multiprocessing
import re
import time
from pathlib import Path

import torch

from benchmarks.cli import at_least, heading, new_parser, table
from model import LMConfig, Transformer, loss
from training.arguments import TrainingArguments
from training.engine.estimate import Workload, estimate
from training.engine.kinds import DDP

PROGRAM = "benchmarks.large_vocabulary"
# SmolLM2-135M's, with fewer of its 30 layers.
SHAPE = {"dim": 576, "n_layers": 2, "n_heads": 9, "n_kv_heads": 3, "hidden_dim": 1536}
SEQ_LEN = 512


def resident(key: str) -> int:
    """Return bytes: VmRSS now, VmHWM at most since the last reset."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(re.search(rf"{key}:\s+(\d+)", status)[1])


def measure(vocab_size: int, batch_size: int, dtype: str, whole: bool) -> tuple[int, int, float]:
    """Return the bytes above what the model takes, gradients included: measured, and as the start
    block would expect; and the seconds."""
    if whole:
        loss.LARGE_VOCABULARY = vocab_size
    config = LMConfig(vocab_size=vocab_size, max_seq_len=SEQ_LEN, **SHAPE)
    model = Transformer(config)
    tokens = torch.randint(vocab_size, (batch_size, SEQ_LEN))
    before, started = resident("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        value = model(tokens, tokens).loss
    value.backward()
    seconds = time.perf_counter() - started
    args = TrainingArguments(batch_size=batch_size, dtype=dtype)
    work = Workload.of(args, config, processes=1, device=torch.device("cpu"), compiled=False)
    expected = estimate(DDP, work).working + 4 * work.total
    return resident("VmHWM") - before, expected, seconds


def main(argv: list[str] | None = None) -> None:
    parser = new_parser(PROGRAM, __doc__)
    parser.add_argument("--vocab_size", type=at_least(1), default=49_152)
    parser.add_argument("--batch_size", type=at_least(1), default=8, help=f"of {SEQ_LEN} tokens")
    args = parser.parse_args(argv)
    rows = []
    for dtype in ("float32", "bfloat16"):
        for name, whole in (("whole", True), ("in chunks", False)):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                row = pool.apply(measure, (args.vocab_size, args.batch_size, dtype, whole))
            measured, expected, seconds = row
            rows.append(
                {
                    "precision, loss": f"{dtype}, {name}",
                    "measured, GB": f"{measured / 1e9:.2f}",
                    "expected, GB": f"{expected / 1e9:.2f}",
                    "seconds": f"{seconds:.1f}",
                }
            )
    print(f"{heading(PROGRAM, argv)}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
