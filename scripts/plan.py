r"""Estimate memory, network traffic and hours of training with each engine.

    python -m scripts.plan --dim 1024 --n_layers 32 --max_seq_len 1024 --batch_size 24 \
        --accumulation_steps 32 --num_processes 4 --gpu_memory 48 --device "RTX 6000 Ada"
"""

import math
import os
from argparse import Namespace
from dataclasses import replace

import torch

from common.errors import UsageError, one_line_errors
from common.numbers import columns, counted, memory
from engine.compilation import should_compile
from engine.hardware import GIB, available_memory, peak_flops
from engine.memory import OVERHEAD, Workload, can_coalesce, engines, estimate, fits, largest_batch
from formats.portable import without_memory
from model import ConfigError, LMConfig
from scripts.model_flags import at_least_1
from training.arguments import as_arguments, build_parser

TOKENS_PER_PARAMETER = 20  # compute-optimal: https://arxiv.org/abs/2203.15556
# The training flags that change the estimate. The flags of the model change it too.
TRAINING_FLAGS = "accumulation_steps", "batch_size", "compile", "dtype", "gradient_checkpointing"
TRAINING_FLAGS += "coalesce_reduction", "max_steps", "optimizer", "tf32"
PLAN_FLAGS = "num_processes", "vocab_size", "gpu_memory", "ram", "device", "mfu", "tokens"


@one_line_errors("plan", UsageError, ConfigError)
def main(argv: list[str] | None = None) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # by default DeepSpeed warns if there is no GPU
    parser = build_parser(only=TRAINING_FLAGS)
    parser.prog, parser.description = "python -m scripts.plan", __doc__
    add = parser.add_argument_group("plan").add_argument
    add("--num_processes", type=at_least_1, default=1, help="processes, one per GPU")
    add("--vocab_size", type=int, default=6400, help="vocabulary size of the tokenizer")
    add("--gpu_memory", type=float, help="memory of a GPU in GiB (default: this machine's)")
    add(
        "--ram",
        type=float,
        help="RAM of all processes in GiB (default with this machine's GPUs: its)",
    )
    add("--device", help="name of the GPU, such as 'H100' (default: this machine's GPU)")
    add("--mfu", type=float, default=0.4, help="model FLOPs utilization, to estimate hours")
    add("--tokens", type=float, help="training tokens (default: max_steps, or 20 per parameter)")
    print(describe(vars(parser.parse_args(argv))))


def describe(options: dict) -> str:
    """Return the table and the advice. Raises UsageError or ConfigError if a value cannot work."""
    plan = Namespace(**{name: options.pop(name) for name in PLAN_FLAGS})
    args, model_settings = as_arguments(options)
    processes = plan.num_processes
    if not all(x is None or x > 0 for x in (plan.gpu_memory, plan.ram, plan.mfu, plan.tokens)):
        raise UsageError("--gpu_memory, --ram, --mfu and --tokens must be above 0")
    has_gpu = torch.cuda.is_available()
    if plan.device and not plan.gpu_memory and not has_gpu:
        raise UsageError(f"--device {plan.device}: also pass --gpu_memory, in GiB")
    device = torch.device("cuda" if plan.gpu_memory or has_gpu else "cpu")
    name = plan.device or (torch.cuda.get_device_name() if has_gpu else "this device")
    precision = "tf32" if args.tf32 else args.mixed_precision.replace("no", "fp32")
    peak = peak_flops(name, precision)
    limit = int((plan.gpu_memory or 0) * GIB) or available_memory(device, processes)
    ram = math.inf  # bytes for each process; unknown for another machine
    if plan.ram or not plan.gpu_memory:
        free = available_memory(torch.device("cpu"), processes)
        ram = plan.ram * GIB / processes if plan.ram else free
    shapes = without_memory(LMConfig(**model_settings, vocab_size=plan.vocab_size))
    seq_len, total = shapes.config.max_seq_len, shapes.num_parameters()
    step = args.global_batch(processes) * seq_len  # tokens
    suitable = TOKENS_PER_PARAMETER * shapes.num_parameters(active=True)
    tokens = plan.tokens or (args.max_steps or 0) * step or suitable
    flops = tokens * shapes.flops_per_token(seq_len)  # FLOPs of the whole run
    compiled = should_compile(args.compile, flops / processes, device)
    work = Workload(args=args, shapes=shapes, processes=processes, device=device, compiled=compiled)
    hours = f"{flops / (peak * plan.mfu * processes) / 3600:.3g}" if peak else "?"
    rows, advice = [], ""
    for kind in engines():
        if args.optimizer == "muon" and not kind.takes_muon:
            continue
        coalesces = can_coalesce(kind, work, limit)
        expected = estimate(replace(kind, coalesces=coalesces), work)
        row = {
            "engine": kind.name,
            "memory" if work.on_cpu else "GPU memory": memory(expected.peak),
            "RAM": memory(expected.ram) if expected.ram else "0",
            "largest batch": str(largest_batch(kind, work, limit)),
            "GB sent per step": f"{expected.sent / 1e9:.2f}",
            "hours": hours,
        }
        rows.append(row)
        if not advice and fits(kind, work, limit, ram):  # the first engine that fits is preferred
            command = f"ENGINE={kind.config} bash run_accelerate.sh"
            advice = f"Take {kind.name}, the first that fits, with your model's flags:\n{command}"
            if expected.ram:
                needs = memory(processes * expected.ram)
                advice += f"\nIts {counted(processes, 'processes')} need {needs} of RAM together"
                advice += f", and {memory(12 * total)} more while a checkpoint is written"
                advice += "." if ram < math.inf else " (with --ram, the plan compares it)."
    advice = advice or "No engine fits: take a smaller --batch_size or more memory."
    note = "The hours ignore communication: an engine that sends more takes longer than they say.\n"
    if not peak:
        note = ""
        advice += f"\nHours are unknown for {name} in {precision}: pass a --device such as H100"
    return (
        f"{total / 1e6:.2f} million parameters, {step:,} tokens per step, "
        f"{tokens / 1e9:.3g} billion tokens in {tokens / step:,.0f} steps\n"
        f"{limit / GIB:.1f} GiB for each of {processes} processes, of which {OVERHEAD // GIB} for "
        f"libraries; {name} at {plan.mfu:.0%} MFU\n\n{columns(rows)}\n{note}\n{advice}"
    )


if __name__ == "__main__":
    main()
