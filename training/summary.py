"""The block printed at start: everything that is in use, so that nothing is in use silently."""

import os

import torch
from torch.utils.data import DataLoader

from data.dataset import PackedDataset
from model import LMConfig, Transformer
from training.advice import faster_engine
from training.arguments import TrainingArguments
from training.attention_kernel import attention_kernel
from training.engine import Engine
from training.hardware import device_name
from training.memory import (
    GIB,
    activation_bytes,
    free_memory,
    gradient_bytes,
    model_state_bytes,
)
from training.optimizer import muon_matrices
from training.resume import Choice
from training.schedule import LearningRate
from training.wording import counted


def start_block(
    args: TrainingArguments,
    config: LMConfig,
    engine: Engine,
    train_set: PackedDataset,
    val_loader: DataLoader | None,
    model: Transformer,
    learning_rate: LearningRate,
    choice: Choice,
    compiled: str,
) -> str:
    """One line per fact, names aligned."""
    accelerator = engine.accelerator
    samples_per_step = args.batch_size * args.accumulation_steps * accelerator.num_processes
    n_parameters = model.num_parameters()
    optimizer, n_by_muon = _optimizer(args, model)
    where = (engine.zero_stage, accelerator.num_processes)
    states = model_state_bytes(n_parameters, args.dtype, *where, n_by_muon=n_by_muon)
    on_cpu = accelerator.device.type == "cpu"
    dtype = getattr(torch, args.dtype)
    attention, keeps_scores = attention_kernel(config, dtype, accelerator.device)
    activations = activation_bytes(config, args.batch_size, args.dtype, on_cpu, keeps_scores)
    fields = {
        "run folder": str(choice.folder.path),
        "starts from": _origin(args, choice),
        "engine": engine.name,
        "processes": f"{accelerator.num_processes} "
        f"({accelerator.state.backend or 'no process group'})",
        "device": device_name(accelerator.device),
        "precision": {"bf16": "bf16", "fp16": "fp16", "no": "fp32"}[accelerator.mixed_precision],
        "attention": attention,
        "compiled": compiled,
        "parameters": f"{n_parameters / 1e6:.2f} million (dim {config.dim}, "
        f"{counted(config.n_layers, 'layers')}, {counted(config.n_heads, 'heads')}, "
        f"{counted(config.n_kv_heads, 'kv heads')}, "
        f"vocabulary {config.vocab_size:,})",
        "optimizer": optimizer,
        "data": f"{args.data}: {train_set.n_tokens:,} tokens, "
        f"{len(train_set):,} sequences of {config.max_seq_len}"
        + (f"; validation on {len(val_loader.dataset):,}" if val_loader else "; NO VALIDATION"),
        "global batch": f"{samples_per_step:,} sequences = "
        f"{samples_per_step * config.max_seq_len:,} tokens per step ({args.batch_size} × "
        f"{args.accumulation_steps} accumulation × {accelerator.num_processes} processes)",
        "steps": f"{learning_rate.total_steps:,} "
        f"({learning_rate.total_steps * samples_per_step / len(train_set):.2f} epochs), "
        f"learning rate {args.learning_rate:g} after {learning_rate.warmup_steps:,} warm-up steps, "
        f"{args.lr_schedule}",
        "memory": f"about {(states + activations) / GIB:.2f} GiB per process expected "
        f"({states / GIB:.2f} weights and optimizer, {activations / GIB:.2f} activations), "
        "besides about 1 GiB for Python and PyTorch",
    }
    if advice := _advice(args, engine, n_parameters, n_by_muon, activations):
        fields["advice"] = advice
    return "\n".join(f"{name:>13}: {value}" for name, value in fields.items())


def _origin(args: TrainingArguments, choice: Choice) -> str:
    """Where the weights come from."""
    if choice.checkpoint is None:
        return choice.new_weights
    return choice.checkpoint.name + (", not again --init_from" if args.init_from else "")


def _optimizer(args: TrainingArguments, model: Transformer) -> tuple[str, int]:
    """Who steps what, and how many parameters are stepped by Muon."""
    if args.optimizer == "adamw":
        return "AdamW", 0
    matrices = muon_matrices(model)
    count = sum(p.numel() for p in matrices)
    return (
        f"Muon on {len(matrices)} matrices ({count / 1e6:.2f} million parameters) at learning rate "
        f"{args.muon_learning_rate:g}, AdamW on the rest"
    ), count


def _advice(
    args: TrainingArguments, engine: Engine, n_parameters: int, n_by_muon: int, activations: int
) -> str | None:
    accelerator, plugin = engine.accelerator, engine.accelerator.state.deepspeed_plugin
    if plugin is not None and "offload_optimizer" in plugin.deepspeed_config["zero_optimization"]:
        return None  # memory is short, and not to be told from here
    processes, device = accelerator.num_processes, accelerator.device
    on_cpu = device.type == "cpu"
    # On a CPU the processes of a machine share one memory.
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", processes)) if on_cpu else 1

    def states(stage: int | None) -> int:
        return model_state_bytes(n_parameters, args.dtype, stage, processes, n_by_muon=n_by_muon)

    def fits(stage: int | None) -> bool:
        """Whether it would in the place of this engine, whose weights and optimizer are in memory
        already."""
        free, size = free_memory(device), (n_parameters, args.dtype, engine.zero_stage, processes)
        held = states(engine.zero_stage) - gradient_bytes(*size)
        more = states(stage) - held + activations + GIB
        return free is not None and sharing * more <= free

    run = (engine.zero_stage, processes, args.accumulation_steps, n_parameters, args.dtype)
    return faster_engine(*run, on_cpu, fits)
