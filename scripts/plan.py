"""Memory, bytes sent and hours of a training by each engine, before anything is started.

    python -m scripts.plan --dim 1024 --n_layers 32 --max_seq_len 1024 --batch_size 24 \
        --accumulation_steps 32 --num_processes 4 --gpu_memory 48 --device "RTX 6000 Ada"
"""

import os

import torch

from common.errors import UsageError, one_line_errors
from common.numbers import columns
from model import ConfigError, LMConfig, Transformer
from scripts.model_flags import at_least_1
from training.arguments import as_arguments, build_parser
from training.engine.device import GIB, available_memory, peak_flops
from training.engine.estimate import OVERHEAD, Workload, engines, estimate, fits, largest_batch

TOKENS_PER_PARAMETER = 20  # https://arxiv.org/abs/2203.15556
TRAINING_FLAGS = "accumulation_steps", "batch_size", "compile", "dtype", "gradient_checkpointing"
TRAINING_FLAGS += "max_steps", "optimizer", "tf32"


def parse_options(argv: list[str] | None = None) -> dict:
    """Return the flags that were typed; those of "plan" have their defaults."""
    parser = build_parser(only=TRAINING_FLAGS)
    parser.prog, parser.description = "python -m scripts.plan", __doc__
    add = parser.add_argument_group("plan").add_argument
    add("--num_processes", type=at_least_1, default=1, help="processes, one for each GPU")
    add("--vocab_size", type=int, default=6400, help="pieces of the tokenizer")
    add("--gpu_memory", type=float, help="GiB of a GPU (default: of this machine's, or its RAM)")
    add("--device", help="GPU by whose peak hours are counted, such as 'H100' (default: this one)")
    add("--mfu", type=float, default=0.4, help="share of that peak that training reaches")
    add("--tokens", type=float, help="to train on (default: max_steps, else 20 per parameter)")
    return vars(parser.parse_args(argv))


def describe(options: dict) -> str:
    """Return the table and the advice. Raises UsageError, ConfigError: a value cannot work."""
    plan = ("num_processes", "vocab_size", "gpu_memory", "device", "mfu", "tokens")
    processes, vocab_size, gpu_memory, name, mfu, tokens = (options.pop(key) for key in plan)
    args, model_settings = as_arguments(options)
    has_gpu = torch.cuda.is_available()
    if name and not gpu_memory and not has_gpu:
        raise UsageError(f"--device {name}: say its --gpu_memory too, in GiB")
    device = torch.device("cuda" if gpu_memory or has_gpu else "cpu")
    name = name or (torch.cuda.get_device_name() if has_gpu else "this device")
    peak = peak_flops(name, "tf32" if args.tf32 else args.mixed_precision.replace("no", "fp32"))
    room = int(gpu_memory * GIB) if gpu_memory else available_memory(device, processes) or 0
    with torch.device("meta"):
        shapes = Transformer(LMConfig(**model_settings, vocab_size=vocab_size))
    compiled = args.compile == "on" or (args.compile == "auto" and device.type == "cuda")
    work = Workload(args=args, shapes=shapes, processes=processes, device=device, compiled=compiled)
    seq_len = work.config.max_seq_len
    step = args.global_batch(processes) * seq_len
    tokens = tokens or (args.max_steps or 0) * step or TOKENS_PER_PARAMETER * work.total
    flops = tokens * work.shapes.flops_per_token(seq_len)
    hours = f"{flops / (peak * mfu * processes) / 3600:.3g}" if peak else "?"
    rows, advice = [], ""
    takes = [k for k in engines(work.config.dim) if k.takes_muon or args.optimizer != "muon"]
    for kind in takes:
        expected = estimate(kind, work)
        row = {
            "engine": kind.name,
            "GiB" if work.on_cpu else "GPU GiB": f"{expected.peak / GIB:.2f}",
            "RAM GiB": f"{expected.ram / GIB:.2f}",
            "largest batch": str(largest_batch(kind, work, room)),
            "GB sent per step": f"{expected.sent / 1e9:.2f}",
            "hours": hours,
        }
        rows.append(row)
        if not advice and fits(kind, work, room):
            take = f"ENGINE={kind.config} bash run_accelerate.sh"
            advice = f"Take {kind.name}, the first that fits:\n{take}"
    return (
        f"{work.total / 1e6:.2f} million parameters, {step:,} tokens per step, "
        f"{tokens / 1e9:.3g} billion tokens in {tokens / step:,.0f} steps\n"
        f"{room / GIB:.1f} GiB for each of {processes} processes, of which {OVERHEAD // GIB} for "
        f"libraries; {name} at {mfu:.0%} MFU\n\n"
        f"{columns(rows)}\n\n"
        + (advice or "No engine fits with this --batch_size: take a smaller one, or more memory.")
    )


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("plan", UsageError, ConfigError):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would warn that it found no GPU
        print(describe(parse_options(argv)))


if __name__ == "__main__":
    main()
