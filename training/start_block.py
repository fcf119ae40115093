"""The block printed at start: everything that is in use, so that nothing is in use silently."""

import torch

from common.numbers import counted
from model import LMConfig
from runs.checkpoint import space_warning
from training.arguments import TrainingArguments
from training.engine.advice import faster_engine, lighter_engine
from training.engine.attention_kernel import attention_kernel
from training.engine.device import device_name, matrix_precision
from training.engine.failures import less_memory
from training.engine.kinds import GPU, Kind
from training.engine.launch import Engine
from training.engine.memory import (
    GIB,
    MemoryPlan,
    available_memory,
    expect,
    needs,
    sum_bytes,
)
from training.engine.state import is_deepspeeds
from training.engine.workload import Workload
from training.initial_weights import InitialWeights
from training.run import Run
from training.teacher import Teacher

FEW_STEPS = 50


def start_block(run: Run, initial: InitialWeights, beside: int = 0) -> str:
    """One line per fact, names aligned; `beside` as in `start_run`."""
    args, engine, built = run.args, run.engine, run.built
    config, rate = built.config, run.learning_rate
    device = run.accelerator.device
    n_sequences = len(run.train_set)
    attention, keeps_scores = attention_kernel(config, getattr(torch, args.dtype), device)
    kind, work = in_use(run)
    validation = "NO VALIDATION"
    if run.val_loader:
        validation = f"validation on {len(run.val_loader.dataset):,}"
    fields = {
        "run folder": str(run.folder.path),
        "starts from": _origin(run, initial),
        "engine": engine.name + _hint(engine),
        "processes": f"{engine.processes} ({run.accelerator.state.backend or 'no process group'})",
        "device": device_name(device),
        "precision": _precision(run.accelerator.mixed_precision, sum_bytes(kind, work)),
        "attention": attention,
        "compiled": str(built.compilation),
        "parameters": _parameters(built.n_parameters, config) + _trained(run),
        "optimizer": _optimizer(run),
        "data": f"{args.data}: {_data(run)}; {validation}",
        "global batch": f"{run.samples_per_step:,} sequences = "
        f"{run.samples_per_step * run.train_set.tokens_per_sample:,.0f} tokens per step "
        f"({args.batch_size} × "
        f"{args.accumulation_steps} accumulation × {engine.processes} processes)",
        "steps": f"{rate.total_steps:,} "
        f"({rate.total_steps * run.samples_per_step / n_sequences:.2f} epochs), "
        f"learning rate {args.learning_rate:g} after {rate.warmup_steps:,} warm-up steps, "
        f"{args.lr_schedule}",
        "checkpoints": _checkpoints(run),
        "memory": _memory(expect(kind, work), beside),
    }
    if run.teacher:
        fields["teacher"] = _teacher(run.teacher, args.dtype)
    if args.gradient_checkpointing != "off":
        keeps = args.gradient_checkpointing == "selective" and not keeps_scores
        fields["recomputed"] = f"blocks{', but not attention' * keeps}, in backward"
    if advice := faster_engine(kind, work, _room(run, beside)):
        fields["advice"] = advice
    return "\n".join(f"{name:>13}: {value}" for name, value in fields.items())


def _hint(engine: Engine) -> str:
    """What to type who did not mean this engine."""
    if engine.deepspeed is not None or engine.processes == 1:
        return ""
    return (
        " (for ZeRO-2: accelerate launch --use_deepspeed --deepspeed_config_file ds_config.json "
        "..., or --deepspeed ds_config.json behind any launcher)"
    )


def _data(run: Run) -> str:
    """What is read."""
    data = run.train_set
    if data.lengths is None:
        return f"{data.n_tokens:,} tokens, {len(data):,} sequences of {data.seq_len}"
    return f"{data.summary}; {data.share_of_padding(run.sampler):.1%} of positions are padding"


def _parameters(number: int, config: LMConfig) -> str:
    """How many, and the shape that has them."""
    return (
        f"{number / 1e6:.2f} million (dim {config.dim}, {counted(config.n_layers, 'layers')}, "
        f"{counted(config.n_heads, 'heads')}, {counted(config.n_kv_heads, 'kv heads')}, vocabulary "
        f"{config.vocab_size:,})"
    )


def _teacher(teacher: Teacher, dtype: str) -> str:
    """Who teaches, and what this process has of it."""
    found, beside = teacher.found, teacher.found.beside
    divided = beside.kind.name if found.zero else "whole on each process"
    parameters = _parameters(beside.parameters.total, found.config)
    return (
        f"{found.source.path}: {parameters}, {dtype}, never trained; {divided}, "
        f"{teacher.held / 1e6:,.1f} MB of weights per process"
    )


def _trained(run: Run) -> str:
    """How many of the parameters, if not all."""
    built, lora = run.built, run.built.lora
    if lora is None:
        return ""
    return (
        f", of which {built.n_trained / 1e6:.2f} million are trained: LoRA of dim {lora.dim} and "
        f"alpha {lora.alpha:g} in {lora.module_name!r}{', and all others' * (not lora.only_lora)}"
    )


def _precision(mixed_precision: str, sums: int) -> str:
    """Of forward and backward, and of sums of gradients, which have so many bytes."""
    precision = matrix_precision(mixed_precision)
    said = "fp32, matrix products in TF32" if precision == "tf32" else precision
    return said if sums == 4 else f"{said}, gradients added up in 16 bits too"


def _checkpoints(run: Run) -> str:
    """When they come."""
    args, total_steps = run.args, run.learning_rate.total_steps
    when = [f"every {args.save_interval:,} steps"] if 0 < args.save_interval < total_steps else []
    if run.val_loader and 0 < args.eval_interval < total_steps:
        when.append("at each best validation")
    if args.save_minutes:
        when.append(f"every {args.save_minutes:g} minutes")
    return ", ".join([*when, "at the end"])


def warnings(run: Run, beside: int = 0) -> list[str]:
    """What to know before the first step; `beside` as in `start_run`."""
    found, args, total_steps = [], run.args, run.learning_rate.total_steps
    for name in ("log_interval", "eval_interval", "save_interval"):
        value = getattr(args, name)
        if value > total_steps and value != getattr(TrainingArguments, name):
            found.append(
                f"WARNING: --{name} {value} lies beyond the last step, {total_steps}: it counts "
                "optimizer steps, of --accumulation_steps micro-batches each"
            )
    if total_steps < FEW_STEPS:
        more = "a smaller global batch (--batch_size, --accumulation_steps), more --epochs or text"
        more = "a higher --max_steps gives more" if args.max_steps else f"{more} give more"
        found.append(f"WARNING: {total_steps} steps are hardly training; {more}")
    kind, work = in_use(run)
    taught_by = work.teacher.parameters.total if work.teacher else 0
    if 0 < taught_by < work.parameters.total:
        found.append(
            f"WARNING: the teacher, {run.teacher.found.source.path}, is smaller than its student; "
            "--teacher names another"
        )
    needed, room = needs(kind, work), _room(run, beside)
    if room is not None and needed > room:
        found.append(
            f"WARNING: a process may need {needed / GIB:.1f} GiB of memory and can have "
            f"{max(room, 0) / GIB:.1f}{' beside the other models' * bool(beside)}: "
            f"{less_memory(run.args, run.built.config.use_flash_attn)}"
            f"{lighter_engine(kind, work, room)}"
        )
    if run.engine.total(int(not run.folder.path.exists())):
        found.append(
            f"WARNING: not every machine sees {run.folder.path}, where the first one writes: to "
            "--resume it takes a folder that all of them see"
        )
    elif full := space_warning(run.folder.path, run.built.n_trained, run.args.keep_last):
        found.append(full)
    return found


def _origin(run: Run, initial: InitialWeights) -> str:
    """Where the weights come from."""
    if run.start.checkpoint is None:
        return initial.describe()
    return run.start.checkpoint.name + (", not again --init_from" if run.args.init_from else "")


def _optimizer(run: Run) -> str:
    """Who steps what."""
    args, built = run.args, run.built
    if args.optimizer == "adamw":
        if run.engine.kind.optimizer_on == GPU:
            return "AdamW"
        is_own = is_deepspeeds(built.state.optimizer)
        return f"AdamW on the CPU, {'DeepSpeed' if is_own else 'PyTorch'}'s"
    return (
        f"Muon on {built.n_muon_matrices} matrices ({built.n_muon_parameters / 1e6:.2f} million "
        f"parameters) at learning rate {args.muon_learning_rate:g}, AdamW on the rest"
    )


def in_use(run: Run) -> tuple[Kind, Workload]:
    """The engine of a run, and what a process of it does in a step."""
    work = Workload.of(
        run.args,
        run.built.config,
        processes=run.engine.processes,
        device=run.accelerator.device,
        compiled=run.built.compilation.on,
        lora=run.built.lora,
        teacher=run.teacher and run.teacher.found.beside,
    )
    return run.engine.kind, work


def _memory(plan: MemoryPlan, beside: int = 0) -> str:
    """What a process is expected to need, in words."""
    elsewhere = {
        "in RAM": plan.host,
        "the teacher in RAM": plan.teacher_in_ram,
        "on NVMe": plan.nvme,
        "kept by the other models": beside,
    }
    return (
        f"about {plan.peak / GIB:.2f} GiB per process expected "
        f"({(plan.held - plan.teacher) / GIB:.2f} weights and optimizer, "
        + (f"{plan.teacher / GIB:.2f} the teacher, " if plan.teacher else "")
        + f"{(plan.peak - plan.held) / GIB:.2f} activations and buffers), "
        + "".join(f"{size / GIB:.2f} {where}, " for where, size in elsewhere.items() if size)
        + "besides about 1 GiB for Python and PyTorch"
    )


def _room(run: Run, beside: int) -> int | None:
    """Bytes that this model can have in the process with the least, None if unknown. All must call
    this."""
    room = available_memory(run.accelerator.device, run.engine.processes)
    return None if room is None else -run.engine.largest(-room) - beside
