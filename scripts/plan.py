r"""Estimate memory, network traffic and hours of training with each engine.

    python -m scripts.plan --dim 1024 --n_layers 32 --max_seq_len 1024 --batch_size 24 \
        --accumulation_steps 32 --num_processes 4 --gpu_memory 48 --device "RTX 6000 Ada"
"""

import math
import os
from argparse import Namespace
from dataclasses import replace

import torch

from lm.common.errors import UsageError, one_line_errors
from lm.common.numbers import columns, counted, memory
from lm.engine import network
from lm.engine.compilation import should_compile
from lm.engine.hardware import GIB, available_memory, peak_flops
from lm.engine.memory import (
    OVERHEAD,
    Workload,
    can_coalesce,
    estimate,
    fits,
    largest_batch,
)
from lm.engine.network import LOSS, Network
from lm.engine.strategy import GPU, strategies
from lm.formats.portable import without_memory
from lm.training.arguments import as_arguments, build_parser
from model import ConfigError, LMConfig
from scripts.model_flags import at_least_1

TOKENS_PER_PARAMETER = 20  # compute-optimal: https://arxiv.org/abs/2203.15556
# The training flags that change the estimate. The flags of the model change it too.
TRAINING_FLAGS = "accumulation_steps", "batch_size", "compile", "dtype", "gradient_checkpointing"
TRAINING_FLAGS += "coalesce_reduction", "max_steps", "optimizer", "tf32"
PLAN_FLAGS = "num_processes", "num_machines", "link", "network", "vocab_size", "gpu_memory", "ram"
PLAN_FLAGS += "device", "mfu", "tokens"
GPUS = 8  # assumed GPUs of a machine
# Words of a GPU's name → the link to the others of its machine, unless "PCIe" is another word.
LINKS = {"A100": "nvlink3", "A800": "160", "H800": "160"}
LINKS |= dict.fromkeys(("H100", "H200", "GH200"), "nvlink4")
LINKS |= dict.fromkeys(("B200", "GB200"), "nvlink5")
PCIE5 = "H100", "H200", "GH200", "H800", "B200", "GB200"  # other GPUs have PCIe 4
SAVES = 0.9  # an engine, or twice the GPUs, is named if it takes less than this share of the time


@one_line_errors("plan", UsageError, ConfigError)
def main(argv: list[str] | None = None) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # by default DeepSpeed warns if there is no GPU
    parser = build_parser(only=TRAINING_FLAGS)
    parser.prog, parser.description = "python -m scripts.plan", __doc__
    add = parser.add_argument_group("plan").add_argument
    add("--num_processes", type=at_least_1, default=1, help="processes, one per GPU")
    add("--num_machines", type=at_least_1, help=f"machines (default: of {GPUS} GPUs each)")
    links = f"GB/s that it reaches, or NAME or NxNAME of {', '.join(network.RATES)}"
    of_gpu = "a GPU's link to the others of its machine"
    add("--link", help=f"{of_gpu}: {links} (default: by the name of the GPU)")
    add("--network", default="ethernet100", help="a machine's links to the others, as --link")
    add("--vocab_size", type=int, default=6400, help="vocabulary size of the tokenizer")
    add("--gpu_memory", type=float, help="memory of a GPU in GiB (default: this machine's)")
    add(
        "--ram",
        type=float,
        help="RAM of all processes in GiB (default with this machine's GPUs: its)",
    )
    add("--device", help="name of the GPU, such as 'H100' (default: this machine's GPU)")
    add("--mfu", type=float, default=0.4, help="model FLOPs utilization without sending")
    add("--tokens", type=float, help="training tokens (default: max_steps, or 20 per parameter)")
    print(describe(vars(parser.parse_args(argv))))


def describe(options: dict) -> str:
    """Return the tables and the advice. Raises UsageError or ConfigError if a value cannot work."""
    plan = Namespace(**{name: options.pop(name) for name in PLAN_FLAGS})
    args, model_settings = as_arguments(options)
    processes = plan.num_processes
    machines = plan.num_machines or math.ceil(processes / GPUS)
    if plan.num_machines and processes % machines:
        raise UsageError(f"--num_machines {machines} does not divide --num_processes {processes}")
    if not all(x is None or x > 0 for x in (plan.gpu_memory, plan.ram, plan.mfu, plan.tokens)):
        raise UsageError("--gpu_memory, --ram, --mfu and --tokens must be above 0")
    has_gpu = torch.cuda.is_available()
    if plan.device and not plan.gpu_memory and not has_gpu:
        raise UsageError(f"--device {plan.device}: also pass --gpu_memory, in GiB")
    device = torch.device("cuda" if plan.gpu_memory or has_gpu else "cpu")
    name = plan.device or (torch.cuda.get_device_name() if has_gpu else "this device")
    precision = "tf32" if args.tf32 else args.mixed_precision.replace("no", "fp32")
    peak = peak_flops(name, precision)
    per_machine = processes // machines if plan.num_machines else GPUS
    here = min(processes, per_machine)  # processes of a machine
    limit = int((plan.gpu_memory or 0) * GIB) or available_memory(device, here)
    ram = math.inf  # bytes for each process; unknown for another machine
    if plan.ram or not plan.gpu_memory:
        free = available_memory(torch.device("cpu"), here)
        ram = plan.ram * GIB / processes if plan.ram else free
    words = name.upper().replace("-", " ").split()
    pcie = "pcie5" if {*words} & {*PCIE5} else "pcie4"
    nvlink = [LINKS[word] for word in words if word in LINKS and "PCIE" not in words]
    link = plan.link or (nvlink or [pcie])[0]
    links = Network(per_machine, *map(network.bytes_per_second, (link, plan.network, pcie)))
    shapes = without_memory(LMConfig(**model_settings, vocab_size=plan.vocab_size))
    seq_len, total = shapes.config.max_seq_len, shapes.num_parameters()
    step = args.global_batch(processes) * seq_len  # tokens
    suitable = TOKENS_PER_PARAMETER * shapes.num_parameters(active=True)
    tokens = plan.tokens or (args.max_steps or 0) * step or suitable
    flops = tokens * shapes.flops_per_token(seq_len)  # FLOPs of the whole run
    compiled = should_compile(args.compile, flops / processes, device)
    work = Workload(args=args, shapes=shapes, processes=processes, device=device, compiled=compiled)
    # Seconds of computing in a step; not a number if the speed of the device is unknown.
    computing = flops * step / tokens / processes / (peak * plan.mfu if peak else math.nan)
    memories, times, fitting = [], [], []
    for kind in strategies():
        if args.optimizer == "muon" and not kind.takes_muon:
            continue
        whole = replace(kind, coalesces=can_coalesce(kind, work, limit))
        expected, time = estimate(whole, work), network.step_time(whole, work, computing, links)
        if fits(kind, work, limit, ram):
            fitting.append((whole, time))
        memories.append(
            {
                "engine": kind.name,
                "memory" if work.on_cpu else "GPU memory": memory(expected.peak),
                "RAM": memory(expected.ram) if expected.ram else "0",
                "largest batch": str(largest_batch(kind, work, limit)),
            }
        )
        most = network.most_processes(kind, work, computing, links, limit)
        hours = known(time.total * tokens / step / 3600)
        is_least = kind.optimizer_on != GPU and not work.on_cpu and peak
        times.append(
            {
                "engine": kind.name,
                "GB sent": f"{network.traffic(whole, work).sent / 1e9:.2f}",
                "computing, s": known(computing),
                "sending, s": known(time.sending),
                "hidden, s": known(time.hidden) if peak else "?",
                "hours": f"≥ {hours}" if is_least else hours,
                "lost": f"{time.lost:.0%}" if peak else "?",
                "most GPUs": (f"{most:,}" if most else "none") if peak else "?",
            }
        )
    lines = [
        f"{total / 1e6:.2f} million parameters, {step:,} tokens per step, "
        f"{tokens / 1e9:.3g} billion tokens in {counted(round(tokens / step), 'steps')}",
        f"{counted(processes, 'processes')}, {limit / GIB:.1f} GiB per process, of which "
        f"{OVERHEAD // GIB} for libraries; {name} at {plan.mfu:.0%} MFU",
        f"{counted(machines, 'machines')}; {link} in a machine, {plan.network} between machines, "
        f"{pcie} to RAM",
        f"\n{columns(memories)}\n\n{columns(times)}",
        "Hidden: sending that is assumed to pass while the GPU computes.",
        f"Most GPUs: the largest power of two that loses less than {LOSS:.0%} of the time.",
        "≥: plus the time of AdamW on the CPU and the time of NVMe, which are not known.\n",
        *advice(fitting, work, links, limit),
    ]
    if fitting and (ram_needed := estimate(fitting[0][0], work).ram):
        needs, copy = memory(processes * ram_needed), memory(12 * total)
        end = "." if ram < math.inf else " (with --ram, the plan compares it)."
        who = f"Its {counted(processes, 'processes')}"
        lines.append(f"{who} need {needs} of RAM together, and {copy} more for a checkpoint{end}")
    if not peak:
        lines.append(f"Hours are unknown for {name} in {precision}: pass a --device such as H100")
    return "\n".join(lines)


def known(value: float) -> str:
    """Return a number, or "?" if it is not a number."""
    return "?" if math.isnan(value) else f"{value:.3g}"


def advice(fitting: list[tuple], work: Workload, links: Network, limit: int) -> list[str]:
    """Return the lines that name the engine to take, a faster one, and the use of more GPUs.
    `fitting` has the engines that fit into `limit` bytes, and the StepTime of each."""
    if not fitting:
        return ["No engine fits: take a smaller --batch_size or more memory."]
    (kind, time), *others = fitting  # the first engine that fits is preferred
    lines = [
        f"Take {kind.name}, the first that fits, with your model's flags:",
        f"ENGINE={kind.config} bash run_accelerate.sh",
    ]
    others = [each for each in others if each[0].optimizer_on == GPU]  # others: time is unknown
    best, fastest = min(others, key=lambda each: each[1].total, default=(kind, time))
    if fastest.total < SAVES * time.total:
        share = f"{1 - fastest.total / time.total:.0%} less time"
        hidden = ", if its sending is hidden as assumed" if fastest.hidden else ""
        lines.append(f"{best.name} would take {share}{hidden}.")
    totals = {work.processes: time.total}
    counts = [2 * work.processes, *(work.processes >> i for i in range(1, 11))]
    for n in counts:
        if 1 <= n <= work.args.global_batch(work.processes):
            totals[n] = network.shared_by(n, kind, work, time.computing, links, limit).total
    fewer = min((n for n in totals if n <= work.processes), key=lambda n: (totals[n], n))
    more = totals.get(2 * work.processes, 0)
    if fewer < work.processes:
        share = f"{1 - totals[fewer] / time.total:.0%} less time"
        lines.append(f"{counted(fewer, 'GPUs')} would take {share}: the network limits this run.")
    elif not more:
        lines.append("Twice the GPUs need a larger global batch: it has too few sequences.")
    elif more >= time.total:
        lines.append("Twice the GPUs would take no less time: do not buy them.")
    elif more > SAVES * time.total:
        saved = f"{1 - more / time.total:.0%} of the time"
        lines.append(f"Twice the GPUs would save only {saved}: do not buy them.")
    return lines


if __name__ == "__main__":
    main()
