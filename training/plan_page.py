"""What scripts.plan says, from its flags: the model, memory by engine, what fits, time, disk."""

import torch

from common.columns import columns
from common.errors import UsageError
from common.numbers import counted
from model import LMConfig
from training.arguments import TrainingArguments, as_arguments
from training.engine.advice import choices, how_to_choose
from training.engine.communication import traffic
from training.engine.device import PEAKS, peak_flops
from training.engine.kinds import DDP, Kind
from training.engine.memory import GIB, OVERHEAD, available_memory, expect, free_memory
from training.engine.workload import Workload
from training.plan import (
    WHOLE_BLOCKS,
    Machine,
    deepspeed_states,
    enough,
    fastest,
    largest_batch,
    ram_of_machine,
    shared,
    step_seconds,
)

TOKENS_PER_PARAMETER = 20  # https://arxiv.org/abs/2203.15556
PLAN_FLAGS = (
    *("num_processes", "vocab_size", "gpu_memory", "ram", "processes_per_machine", "device"),
    *("mfu", "tokens", "bandwidth", "host_bandwidth"),
)


def describe(values: dict) -> str:
    """The whole page.

    Args:
        values: of all flags of scripts.plan that have one.

    Raises UsageError, ConfigError: a value that cannot work.
    """
    asked = {name: values.pop(name) for name in PLAN_FLAGS}
    args, model_settings = as_arguments(values)
    config = LMConfig(**model_settings, vocab_size=asked["vocab_size"])
    counts = asked["num_processes"]
    on_gpu = bool(asked["gpu_memory"] or asked["device"] or torch.cuda.is_available())
    device = torch.device("cuda" if on_gpu else "cpu")
    for_gpu = args.tf32 or args.dtype == "float16"
    if (for_gpu and not on_gpu) or (args.tf32 and args.dtype != "float32"):
        raise UsageError("--dtype float16 and --tf32, which is for float32, take a GPU")
    name = asked["device"] or (torch.cuda.get_device_name() if torch.cuda.is_available() else None)
    machine = _machine(asked, args, device, name)
    compiled = args.compile == "on" or (args.compile == "auto" and on_gpu)
    work = Workload.of(args, config, processes=counts[0], device=device, compiled=compiled)
    sequences = args.batch_size * args.accumulation_steps * counts[0]
    batch = sequences * config.max_seq_len
    n, kinds = work.parameters.total, choices(work)
    tokens = asked["tokens"] or (args.max_steps or 0) * batch or TOKENS_PER_PARAMETER * n
    lines = [
        f"model: {n / 1e6:.2f} million parameters (dim {config.dim}, "
        f"{counted(config.n_layers, 'layers')}, vocabulary {config.vocab_size:,}), {args.dtype}, "
        f"{args.optimizer}",
        f"step: {args.batch_size} × {config.max_seq_len} tokens × {args.accumulation_steps} "
        f"accumulation × {counted(counts[0], 'processes')} = {batch:,} tokens",
        f"tokens: {tokens / 1e9:.3g} billion in {tokens / batch:,.0f} steps; a model of this size "
        f"wants {TOKENS_PER_PARAMETER * n / 1e9:.3g} billion, {TOKENS_PER_PARAMETER} per parameter "
        "(https://arxiv.org/abs/2203.15556)",
        _disk_line(work, args.keep_last),
        "",
        _memory_line(work, machine, asked),
        columns([_memory_row(kind, work, machine) for kind in kinds]),
        MEMORY_NOTE,
        "",
        _choice_line(work, machine),
        "",
        _time_line(asked, machine, name),
        columns(
            [
                _time_row(kind, shared(work, sequences, count), count, sequences, tokens, machine)
                for count in counts
                for kind in (kinds if count <= sequences else kinds[:1])
            ]
        ),
        TIME_NOTE,
    ]
    return "\n".join(lines)


MEMORY_NOTE = (
    "GiB of one process. The peak is less than the sum: logits are gone when a block is at its "
    "backward. batch: sequences of the largest micro-batch that fits. RAM: of a machine, with a "
    f"checkpoint on its way and {OVERHEAD // GIB} GiB per process for libraries, which has to fit "
    "beside the peak too; so has, on a GPU, a third more of what comes and goes, which is not "
    "measured yet. DeepSpeed: its own estimate of weights, gradients and optimizer, GPU + RAM."
)
TIME_NOTE = (
    "sent: by one process in a step. Gradients travel behind backward and ZeRO-3's weights behind "
    "both passes, and are waited for as far as they take longer; the rest is waited for. Computing "
    "is shared by the processes and what is sent is not: where waiting passes 50%, more of them do "
    "not help. Without the CPU's own time to step what is offloaded to it."
)


def _machine(
    asked: dict, args: TrainingArguments, device: torch.device, name: str | None
) -> Machine:
    """Raises UsageError: a device whose peak, or memory, is not known."""
    (per_machine, *more) = asked["processes_per_machine"]
    if more:
        raise UsageError("--processes_per_machine takes one number")
    ram = asked["ram"] * GIB if asked["ram"] else free_memory(torch.device("cpu"))
    here = min(per_machine, asked["num_processes"][0])
    if asked["gpu_memory"]:
        room = int(asked["gpu_memory"] * GIB)
    elif torch.cuda.is_available():
        room = available_memory(device, here)
    else:
        room = None if ram is None else int(ram) // here
    precision = "tf32" if args.tf32 else args.mixed_precision.replace("no", "fp32")
    peak = peak_flops(name, precision) if name else None
    if asked["device"] and peak is None:
        raise UsageError(
            f"--device {name}: its peak in {precision} is not known, but that of {', '.join(PEAKS)}"
        )
    if asked["device"] and not asked["gpu_memory"]:
        raise UsageError(f"--device {name}: say its --gpu_memory too, in GiB")
    return Machine(
        room=room,
        ram=None if ram is None else int(ram),
        per_machine=per_machine,
        bandwidth=asked["bandwidth"] * 1e9,
        host_bandwidth=asked["host_bandwidth"] * 1e9,
        flops=peak and peak * asked["mfu"],
    )


def _disk_line(work: Workload, keep_last: int) -> str:
    """What a run writes."""
    checkpoint, weights = expect(DDP, work).checkpoint / 1e9, 4 * work.parameters.total / 1e9
    count = max(keep_last, 1) + 2  # as runs/checkpoint.py reckons: the best, and one on its way
    return (
        f"disk: {checkpoint:.2f} GB for a checkpoint of any engine, at most {count} at once, and "
        f"{weights:.2f} GB for the weights of the end"
    )


def _memory_line(work: Workload, machine: Machine, asked: dict) -> str:
    if machine.room is None:
        return "memory: how much there is is not known here, say --gpu_memory"
    where = "for a process" if work.on_cpu else "on a GPU"
    found = "--gpu_memory" if asked["gpu_memory"] else "--ram" if asked["ram"] else "found"
    ram = f", {machine.ram / GIB:.1f} GiB of RAM on a machine" if machine.ram else ""
    return f"memory: {machine.room / GIB:.1f} GiB {where} ({found}){ram}"


def gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size else "-"


def _memory_row(kind: Kind, work: Workload, machine: Machine) -> dict[str, str]:
    plan, recomputing = expect(kind, work), work.but(recompute=WHOLE_BLOCKS)
    less = expect(kind, recomputing)
    states = deepspeed_states(kind, work, machine.per_machine)

    def batch(of: Workload) -> str:
        return "?" if machine.room is None else str(largest_batch(kind, of, machine))

    return {
        "engine": kind.name,
        "parameters": gib(plan.parameters),
        "gradients": gib(plan.gradients),
        "optimizer": gib(plan.optimizer),
        "activations": gib(plan.activations),
        "block": gib(plan.block),
        "logits": gib(plan.logits),
        "buffers": gib(plan.buffers),
        "peak": gib(plan.peak),
        "batch": batch(work),
        "| recomputing: activations": gib(less.activations),
        "block ": gib(less.block),
        "peak ": gib(less.peak),
        "batch ": batch(recomputing),
        "| RAM": gib(ram_of_machine(kind, work, machine.per_machine)),
        "NVMe": gib(plan.nvme),
        "| DeepSpeed": " + ".join(map(gib, states)) if states else "-",
    }


def _choice_line(work: Workload, machine: Machine) -> str:
    if machine.room is None:
        return "fastest that fits: not known"
    found = fastest(work, machine)
    if found is None:
        return "fastest that fits: none, not even with one sequence: more processes, or more memory"
    recomputing = "" if found.work.recompute == "off" else " with --gradient_checkpointing"
    return (
        f"fastest that fits: {found.kind.name}{recomputing}, --batch_size up to {found.most}: "
        f"{how_to_choose(found.kind)}"
    )


def _time_line(asked: dict, machine: Machine, name: str | None) -> str:
    network = f"{asked['bandwidth']:g} GB/s between processes, {asked['host_bandwidth']:g} to RAM"
    if machine.flops is None:
        return f"time: hours take a --device whose peak is known; {network}"
    return (
        f"time: {name} at {asked['mfu']:.0%} of {machine.flops / asked['mfu'] / 1e12:g} TFLOP/s "
        f"(--mfu; a run's log has its own), {network}"
    )


def _time_row(
    kind: Kind,
    work: Workload | None,
    count: int,
    sequences: int,
    tokens: float,
    machine: Machine,
) -> dict[str, str]:
    """One engine with so many processes, among which the global batch is shared."""
    titles = ("batch", "peak", "fits", "sent, MB", "exchange, s", "mostly")
    titles += ("step, s", "waiting", "hours")
    row = {"engine": kind.name, "processes": f"{count:,}"} | dict.fromkeys(titles, "-")
    if work is None:
        return row | {"engine": "any: more than the batch has sequences"}
    exchange, batch = traffic(kind, work), work.batch_size * work.accumulation_steps * count
    seconds = {
        "gradients": exchange.in_backward / machine.bandwidth,
        "weights": exchange.in_step / machine.bandwidth,
        "end of step": exchange.after / machine.bandwidth,
        "RAM or NVMe": exchange.moved / machine.host_bandwidth,
    }
    row |= {
        "batch": f"{work.batch_size} × {work.accumulation_steps}"
        + (f" ({batch:,} in all)" if batch < sequences else ""),
        "peak": gib(expect(kind, work).peak),
        "sent, MB": f"{exchange.sent / 1e6:,.0f}",
        "exchange, s": f"{sum(seconds.values()):.3g}",
        "mostly": max(seconds, key=seconds.get) if any(seconds.values()) else "-",
    }
    if machine.room is not None:
        row["fits"] = "yes" if enough(kind, work, machine) else "no"
    if machine.flops:
        computing, waiting = step_seconds(kind, work, machine)
        steps = tokens / (batch * work.config.max_seq_len)
        row |= {
            "step, s": f"{computing + waiting:.3g}",
            "waiting": f"{waiting / (computing + waiting):.0%}",
            "hours": f"{steps * (computing + waiting) / 3600:,.3g}",
        }
    return row
