"""The block printed at start: everything that is in use, so that nothing is in use silently."""

import os

import torch

from common.numbers import counted
from data.shards import CONVERSATIONS
from model import LMConfig
from training.arguments import TrainingArguments
from training.engine.attention_kernel import attention_kernel
from training.engine.device import device_name, matrix_precision
from training.engine.estimate import Estimate, Workload, advice, estimate, fits
from training.engine.failures import less_memory
from training.engine.kinds import GPU
from training.engine.memory import GIB, available_memory
from training.optimizer import muon_matrices
from training.run import Run
from training.teacher import Teacher

FEW_STEPS = 50


def start_block(run: Run) -> str:
    """Return one line per fact, names aligned."""
    args, engine, prepared, rate = run.args, run.engine, run.prepared, run.learning_rate
    config, device, built = prepared.config, run.accelerator.device, run.built
    attention, keeps_scores = attention_kernel(config, getattr(torch, args.dtype), device)
    n_sequences, batch = len(prepared.train_set), run.batches.samples_per_step
    tokens_per_step = batch * prepared.train_set.tokens_per_sample
    validation = "NO VALIDATION"
    if run.val_loader:
        validation = f"validation on {len(run.val_loader.dataset):,}"
    origin = prepared.initial.describe()
    if checkpoint := prepared.start.checkpoint:
        origin = checkpoint.name + (", not again --init_from" if args.init_from else "")
    parameters = prepared.shapes.num_parameters()
    work, room = _needs(run)
    fields = {
        "run folder": str(run.folder.path),
        "starts from": origin,
        "engine": engine.name + _hint(run),
        "processes": f"{engine.processes} ({run.accelerator.state.backend or 'no process group'})",
        "device": device_name(device),
        "precision": _precision(run),
        "attention": attention,
        "compiled": str(built.compilation),
        "parameters": _parameters(parameters, config) + _trained(run),
        "optimizer": _optimizer(run),
        "data": f"{args.data}: {_data(run)}; {validation}",
        "global batch": f"{batch:,} sequences = {tokens_per_step:,.0f} tokens per step "
        f"({args.batch_size} × {args.accumulation_steps} accumulation × {engine.processes} "
        "processes)",
        "steps": f"{rate.total_steps:,} ({rate.total_steps * batch / n_sequences:.2f} epochs), "
        f"learning rate {args.learning_rate:g} after {rate.warmup_steps:,} warm-up steps, "
        f"{rate.schedule}",
        "checkpoints": _checkpoints(run),
        "memory": _memory(estimate(engine.kind, work)),
    }
    if run.teacher:
        fields["teacher"] = _teacher(run.teacher, args.dtype)
    if args.gradient_checkpointing != "off":
        keeps = args.gradient_checkpointing == "selective" and not keeps_scores
        fields["recomputed"] = f"blocks{', but not attention' * keeps}, in backward"
    if prepared.schedule_note:
        fields["schedule"] = prepared.schedule_note
    if better := advice(engine.kind, work, room):
        fields["advice"] = better
    return "\n".join(f"{name:>13}: {value}" for name, value in fields.items())


def _needs(run: Run) -> tuple[Workload, int | None]:
    """Return what a process does in a step, and the bytes that the process with the least memory
    can have, None if unknown. Every process must call it."""
    device, processes = run.accelerator.device, run.engine.processes
    room = available_memory(device, processes)
    room = None if room is None else -run.engine.largest(-room)
    return run.prepared.workload(processes, device, run.built.compilation.on), room


def _hint(run: Run) -> str:
    """Return what to type for ZeRO-2, unless run_accelerate.sh was told which engine to take."""
    engine = run.engine
    if engine.deepspeed is not None or engine.processes == 1 or "RESUME_WITH" in os.environ:
        return ""
    return (
        " (for ZeRO-2: accelerate launch --use_deepspeed --deepspeed_config_file ds_config.json "
        "..., or --deepspeed ds_config.json behind any launcher)"
    )


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


def _trained(run: Run) -> str:
    """Return how many of the parameters are trained, if not all."""
    lora = run.prepared.shapes.lora
    if lora is None:
        return ""
    return (
        f", of which {run.prepared.n_trained / 1e6:.2f} million are trained: LoRA of dim "
        f"{lora.dim} and alpha {lora.alpha:g} in {lora.module_name!r}"
        f"{', and all others' * (not lora.only_lora)}"
    )


def _optimizer(run: Run) -> str:
    args = run.args
    if args.optimizer == "adamw":
        if run.engine.kind.optimizer_on == GPU:
            return "AdamW"
        owner = type(run.optimizer.optimizer).__module__.partition(".")[0]
        return f"AdamW on the CPU, {'DeepSpeed' if owner == 'deepspeed' else 'PyTorch'}'s"
    matrices = muon_matrices(run.prepared.shapes)
    size = sum(matrix.numel() for matrix in matrices)
    return (
        f"Muon on {len(matrices)} matrices ({size / 1e6:.2f} million parameters) at learning rate "
        f"{args.muon_learning_rate:g}, AdamW on the rest"
    )


def _data(run: Run) -> str:
    data = run.prepared.train_set
    if data.lengths is None:
        return f"{data.n_tokens:,} tokens, {len(data):,} sequences of {data.seq_len}"
    padding = data.share_of_padding(run.batches.sampler)
    return f"{data.summary}; {padding:.1%} of positions are padding"


def _checkpoints(run: Run) -> str:
    """Return when checkpoints are saved."""
    args, total_steps = run.args, run.total_steps
    when = [f"every {args.save_interval:,} steps"] if 0 < args.save_interval < total_steps else []
    if run.val_loader and 0 < args.eval_interval < total_steps:
        when.append("at each best validation")
    if args.save_minutes:
        when.append(f"every {args.save_minutes:g} minutes")
    return ", ".join([*when, "at the end"])


def _memory(expected: Estimate) -> str:
    """Return the memory that a process is expected to need."""
    transient = expected.peak - expected.held - expected.teacher
    parts = {
        "weights and optimizer": expected.held,
        "the teacher": expected.teacher,
        "activations and buffers": transient,
    }
    said = ", ".join(f"{size / GIB:.2f} {name}" for name, size in parts.items() if size)
    elsewhere = {"in RAM": expected.ram, "on NVMe": expected.nvme}
    beside = "".join(f"{size / GIB:.2f} {where}, " for where, size in elsewhere.items() if size)
    return (
        f"about {expected.peak / GIB:.2f} GiB per process expected ({said}), {beside}besides about "
        "1 GiB for Python and PyTorch"
    )


def _teacher(teacher: Teacher, dtype: str) -> str:
    """Return who teaches, and what this process holds of the teacher."""
    found = teacher.found
    divided = found.beside.kind.name if found.zero else "whole on each process"
    number = found.shapes.num_parameters()
    return (
        f"{found.source.path}: {_parameters(number, found.config)}, {dtype}, never trained; "
        f"{divided}, {teacher.held / 1e6:,.1f} MB of weights per process"
    )


def warnings(run: Run) -> list[str]:
    """Return what to know before the first step. Every process must call it."""
    found, args, total_steps = [], run.args, run.total_steps
    if run.prepared.val_set is None:
        why, other = "the split is shorter than one sequence of", "smaller"
        if args.dataset.kind == CONVERSATIONS:
            why, other = "no answer of the split ends within", "larger"
        found.append(
            f"NO VALIDATION: {why} {run.prepared.config.max_seq_len} tokens; prepare the data with "
            f"a larger --val_fraction, or train with a {other} --max_seq_len"
        )
    for name in ("log_interval", "eval_interval", "save_interval"):
        value = getattr(args, name)
        if value > total_steps and value != getattr(TrainingArguments, name):
            found.append(
                f"WARNING: --{name} {value} lies beyond the last step, {total_steps}: it counts "
                "optimizer steps, of --accumulation_steps micro-batches each"
            )
    if total_steps < FEW_STEPS:
        found.append(
            f"WARNING: {total_steps} steps are hardly training; a higher --max_steps, more "
            "--epochs or text, or a smaller global batch give more"
        )
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
