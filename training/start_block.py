"""The block printed at start: everything that is in use, so that nothing is in use silently."""

import os

import torch

from common.numbers import counted
from runs.checkpoint import space_warning
from training.arguments import TrainingArguments
from training.engine.advice import faster_engine
from training.engine.attention_kernel import attention_kernel
from training.engine.compilation import Compilation
from training.engine.device import device_name
from training.engine.launch import Engine
from training.engine.memory import (
    GIB,
    activation_bytes,
    free_memory,
    gradient_bytes,
    model_state_bytes,
)
from training.initial_weights import InitialWeights
from training.resume import StartingPoint
from training.run import Run
from training.setup import BuiltModel

FEW_STEPS = 50


def start_block(
    run: Run,
    built: BuiltModel,
    start: StartingPoint,
    initial: InitialWeights,
    compilation: Compilation,
) -> str:
    """One line per fact, names aligned."""
    args, config, engine, rate = run.args, run.config, run.engine, run.learning_rate
    accelerator, n_sequences = engine.accelerator, len(run.train_set)
    states = model_state_bytes(
        built.n_parameters,
        args.dtype,
        engine.zero_stage,
        engine.processes,
        n_by_muon=built.n_muon_parameters,
    )
    dtype, device = getattr(torch, args.dtype), accelerator.device
    attention, keeps_scores = attention_kernel(config, dtype, device)
    on_cpu = device.type == "cpu"
    activations = activation_bytes(config, args.batch_size, args.dtype, on_cpu, keeps_scores)
    validation = "NO VALIDATION"
    if run.val_loader:
        validation = f"validation on {len(run.val_loader.dataset):,}"
    fields = {
        "run folder": str(run.folder.path),
        "starts from": _origin(args, start, initial),
        "engine": engine.name,
        "processes": f"{engine.processes} ({accelerator.state.backend or 'no process group'})",
        "device": device_name(device),
        "precision": {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision),
        "attention": attention,
        "compiled": str(compilation),
        "parameters": f"{built.n_parameters / 1e6:.2f} million (dim {config.dim}, "
        f"{counted(config.n_layers, 'layers')}, {counted(config.n_heads, 'heads')}, "
        f"{counted(config.n_kv_heads, 'kv heads')}, vocabulary {config.vocab_size:,})",
        "optimizer": _optimizer(args, built),
        "data": f"{args.data}: {run.train_set.n_tokens:,} tokens, "
        f"{n_sequences:,} sequences of {config.max_seq_len}; {validation}",
        "global batch": f"{run.samples_per_step:,} sequences = "
        f"{run.samples_per_step * config.max_seq_len:,} tokens per step ({args.batch_size} × "
        f"{args.accumulation_steps} accumulation × {engine.processes} processes)",
        "steps": f"{rate.total_steps:,} "
        f"({rate.total_steps * run.samples_per_step / n_sequences:.2f} epochs), "
        f"learning rate {args.learning_rate:g} after {rate.warmup_steps:,} warm-up steps, "
        f"{args.lr_schedule}",
        "memory": f"about {(states + activations) / GIB:.2f} GiB per process expected "
        f"({states / GIB:.2f} weights and optimizer, {activations / GIB:.2f} activations), "
        "besides about 1 GiB for Python and PyTorch",
    }
    if advice := _advice(args, engine, built, activations):
        fields["advice"] = advice
    return "\n".join(f"{name:>13}: {value}" for name, value in fields.items())


def warnings(run: Run, built: BuiltModel) -> list[str]:
    """What to know before the first step."""
    found, steps = [], run.learning_rate.total_steps
    if steps < FEW_STEPS:
        found.append(
            f"WARNING: {steps} steps are hardly training; a smaller global batch (--batch_size, "
            "--accumulation_steps), more --epochs or more text give more"
        )
    if full := space_warning(run.folder, built.n_parameters, run.args.keep_last):
        found.append(full)
    return found


def _origin(args: TrainingArguments, start: StartingPoint, initial: InitialWeights) -> str:
    """Where the weights come from."""
    if start.checkpoint is None:
        return initial.describe()
    return start.checkpoint.name + (", not again --init_from" if args.init_from else "")


def _optimizer(args: TrainingArguments, built: BuiltModel) -> str:
    """Who steps what."""
    if args.optimizer == "adamw":
        return "AdamW"
    return (
        f"Muon on {built.n_muon_matrices} matrices ({built.n_muon_parameters / 1e6:.2f} million "
        f"parameters) at learning rate {args.muon_learning_rate:g}, AdamW on the rest"
    )


def _advice(
    args: TrainingArguments, engine: Engine, built: BuiltModel, activations: int
) -> str | None:
    """A faster engine, if there is one that fits."""
    if engine.deepspeed and "offload_optimizer" in engine.deepspeed["zero_optimization"]:
        return None  # memory is short, and not to be told from here
    processes, device = engine.processes, engine.accelerator.device
    on_cpu = device.type == "cpu"
    # On a CPU the processes of a machine share one memory.
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", processes)) if on_cpu else 1
    n_parameters, n_by_muon = built.n_parameters, built.n_muon_parameters

    def states(stage: int | None) -> int:
        return model_state_bytes(n_parameters, args.dtype, stage, processes, n_by_muon=n_by_muon)

    def fits(stage: int | None) -> bool:
        """Whether it would in the place of this engine, whose weights and optimizer are in memory
        already."""
        free = free_memory(device)
        gradients = gradient_bytes(n_parameters, args.dtype, engine.zero_stage, processes)
        held = states(engine.zero_stage) - gradients
        more = states(stage) - held + activations + GIB
        return free is not None and sharing * more <= free

    return faster_engine(
        zero_stage=engine.zero_stage,
        processes=processes,
        accumulation_steps=args.accumulation_steps,
        n_parameters=n_parameters,
        dtype=args.dtype,
        on_cpu=on_cpu,
        fits=fits,
    )
