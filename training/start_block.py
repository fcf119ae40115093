"""The block printed at start: everything that is in use, so that nothing is in use silently."""

import os

import torch

from common.numbers import counted
from data.shards import CONVERSATIONS
from model import LMConfig
from training.engine.attention_kernel import attention_kernel
from training.engine.device import device_name, matrix_precision
from training.engine.estimate import Estimate, Workload, estimate, fits
from training.engine.failures import less_memory
from training.engine.kinds import GPU
from training.engine.memory import GIB, available_memory
from training.optimizer import muon_matrices
from training.run import Run
from training.teacher import Teacher

FEW_STEPS = 50
ZERO_2 = " (for ZeRO-2: --deepspeed ds_config.json, behind any launcher)"


def start_block(run: Run) -> str:
    """Return one line per fact, names aligned. Every process must call it."""
    args, engine, prepared, rate = run.args, run.engine, run.prepared, run.learning_rate
    data, device, batch = prepared.train_set, run.accelerator.device, run.samples_per_step
    lora, dtype = prepared.shapes.lora, getattr(torch, args.dtype)
    attention, keeps_scores = attention_kernel(prepared.config, dtype, device)
    origin = prepared.initial.describe()
    if checkpoint := prepared.start.checkpoint:
        origin = checkpoint.name + ", not again --init_from" * bool(args.init_from)
    read = f"{data.n_tokens:,} tokens, {len(data):,} sequences of {data.seq_len}"
    if data.lengths is not None:
        read = data.summary
    held_out = "NO VALIDATION"
    if run.val_loader:
        held_out = f"validation on {len(run.val_loader.dataset):,}"
    keeps_attention = args.gradient_checkpointing == "selective" and not keeps_scores
    # run_accelerate.sh was told which engine to take.
    is_chosen = "RESUME_WITH" in os.environ
    hint = ZERO_2 if engine.name.startswith("DDP") and not is_chosen else ""
    work, _ = _needs(run)
    fields = {
        "run folder": str(run.folder.path),
        "starts from": origin,
        "engine": engine.name + hint,
        "processes": f"{engine.processes} ({run.accelerator.state.backend or 'no process group'})",
        "device": device_name(device),
        "precision": _precision(run),
        "attention": attention,
        "compiled": str(run.built.compilation),
        "parameters": _parameters(prepared.shapes.num_parameters(), prepared.config),
        "adapters": lora
        and f"LoRA of dim {lora.dim} and alpha {lora.alpha:g} in {lora.module_name!r}; "
        f"{prepared.n_trained / 1e6:.2f} million parameters are trained",
        "optimizer": _optimizer(run),
        "data": f"{args.data}: {read}; {held_out}",
        "global batch": f"{batch:,} sequences = {batch * data.tokens_per_sample:,.0f} tokens per "
        f"step ({args.batch_size} × {args.accumulation_steps} accumulation × {engine.processes} "
        "processes)",
        "steps": f"{rate.total_steps:,} ({rate.total_steps * batch / len(data):.2f} epochs), "
        f"learning rate {args.learning_rate:g} after {rate.warmup_steps:,} warm-up steps, "
        f"{rate.schedule}",
        "checkpoints": f"every {args.save_interval:,} steps and {args.save_minutes:g} minutes (0: "
        "never), at each best validation and at the end",
        "memory": _memory(estimate(engine.kind, work)),
        "teacher": run.teacher and _teacher(run.teacher, args.dtype),
        "recomputed": args.gradient_checkpointing != "off"
        and f"blocks{', but not attention' * keeps_attention}, in backward",
        "schedule": prepared.schedule_note,
    }
    return "\n".join(f"{name:>13}: {value}" for name, value in fields.items() if value)


def _needs(run: Run) -> tuple[Workload, int | None]:
    """Return what a process does in a step, and the bytes that the process with the least memory
    can have, None if unknown. Every process must call it."""
    device, processes = run.accelerator.device, run.engine.processes
    room = available_memory(device, processes)
    room = None if room is None else -run.engine.largest(-room)
    return run.prepared.workload(processes, device, run.built.compilation.on), room


def _precision(run: Run) -> str:
    """Return the precision of forward and backward, and of the sums of gradients."""
    precision = matrix_precision(run.accelerator.mixed_precision)
    said = "fp32, matrix products in TF32" if precision == "tf32" else precision
    kind = run.engine.kind
    in_fp32 = kind.stage is None or kind.fp32_sums or run.args.dtype == "float32"
    return said if in_fp32 else f"{said}, gradients added up in 16 bits too"


def _parameters(number: int, config: LMConfig) -> str:
    """Return the number of parameters, and the shape that has them."""
    return (
        f"{number / 1e6:.2f} million (dim {config.dim}, {counted(config.n_layers, 'layers')}, "
        f"{counted(config.n_heads, 'heads')}, {counted(config.n_kv_heads, 'kv heads')}, vocabulary "
        f"{config.vocab_size:,})"
    )


def _optimizer(run: Run) -> str:
    """Return who steps the parameters, and where."""
    if run.args.optimizer == "muon":
        matrices = muon_matrices(run.prepared.shapes)
        rate = run.args.muon_learning_rate
        return f"Muon on {len(matrices)} matrices at learning rate {rate:g}, AdamW on the rest"
    if run.engine.kind.optimizer_on == GPU:
        return "AdamW"
    package = type(run.optimizer.optimizer).__module__.partition(".")[0]
    return f"AdamW of {package} on the CPU"


def _memory(expected: Estimate) -> str:
    """Return the memory that a process is expected to need."""
    sizes = {"weights and optimizer": expected.held, "the teacher": expected.teacher}
    sizes |= {"activations and buffers": expected.working}
    sizes |= {"in RAM": expected.ram, "on NVMe": expected.nvme}
    parts = ", ".join(f"{size / GIB:.2f} {what}" for what, size in sizes.items() if size)
    said = f"about {expected.peak / GIB:.2f} GiB per process expected ({parts})"
    return f"{said}, besides about 1 GiB for Python and PyTorch"


def _teacher(teacher: Teacher, dtype: str) -> str:
    """Return who teaches, and what this process holds of the teacher."""
    found = teacher.found
    divided = found.beside.kind.name if found.zero else "whole on each process"
    parameters = _parameters(found.shapes.num_parameters(), found.config)
    held = f"{divided}, {teacher.held / 1e6:,.1f} MB of weights per process"
    return f"{found.source.path}: {parameters}, {dtype}, never trained; {held}"


def warnings(run: Run) -> list[str]:
    """Return what to know before the first step. Every process must call it."""
    found, args, total_steps = [], run.args, run.total_steps
    if run.prepared.val_set is None:
        other = "larger" if args.dataset.kind == CONVERSATIONS else "smaller"
        found.append(
            "NO VALIDATION: prepare the data with a larger --val_fraction, or train with a "
            f"{other} --max_seq_len than {run.prepared.config.max_seq_len}"
        )
    if total_steps < FEW_STEPS:
        found.append(f"WARNING: {total_steps} steps are hardly training; see --max_steps, --epochs")
    kind, (work, room) = run.engine.kind, _needs(run)
    if room is not None and not fits(kind, work, room):
        found.append(
            f"WARNING: a process may need {estimate(kind, work).peak / GIB:.1f} GiB of memory and "
            f"can have {room / GIB:.1f}: {less_memory(args, run.prepared.config.use_flash_attn)}"
        )
    if run.engine.total(int(not run.folder.path.exists())):
        found.append(
            f"WARNING: not every machine sees {run.folder.path}, where the first one writes: to "
            "--resume it takes a folder that all of them see"
        )
    return found
