"""The summary and the warnings that a run prints before its first step."""

import os

import torch

from lm.common.numbers import counted, memory
from lm.data.shards import CONVERSATIONS
from lm.engine.accelerate_flags import reading_notes
from lm.engine.hardware import (
    attention_kernel,
    available_memory,
    cpu_emulates_bf16,
    device_name,
    processes_here,
)
from lm.engine.memory import Workload, estimate, fits
from lm.engine.strategy import DDP, Strategy, strategy_of
from lm.training.failures import less_memory
from lm.training.optimizer import muon_matrices
from lm.training.run import Run
from model import Transformer


def start_block(run: Run) -> str:
    """Return the summary of a run: one fact per line, with aligned names."""
    args, engine, inputs, rate = run.args, run.engine, run.inputs, run.learning_rate
    device, data, batch = run.accelerator.device, inputs.train_set, run.log.samples_per_step
    attention = attention_kernel(inputs.config, getattr(torch, args.dtype), device)
    lora, checkpoint = inputs.shapes.lora, inputs.start.checkpoint
    origin = f"{inputs.source.path}, with a new optimizer" if inputs.source else "scratch"
    rows = scored = "sequences"
    read = f"{data.n_tokens:,} tokens, {len(data):,} sequences of {data.seq_len}"
    if (n := data.samples_per_epoch) < len(data):
        read = f"{data.n_tokens:,} tokens in {data.segmentations} segmentations, "
        read += f"an epoch is {n:,} sequences of {data.seq_len}"
    if data.kind == CONVERSATIONS:
        rows, scored, read = "rows", CONVERSATIONS, data.summary
        if device.type == "cuda" and inputs.config.use_flash_attn:
            attention = "PyTorch's fused kernel that takes a mask"
    if args.token_noise:
        share = f"{args.token_noise:g} of the input tokens replaced"
        read += f"; {share}, except in the first segmentation"
    if run.val_loader:
        read += f"; validation on {len(run.val_loader.dataset):,} {scored}"
    epochs = rate.total_steps * batch / data.samples_per_epoch
    hint = without_engine(engine.strategy, run.work)
    if engine.name.startswith("DDP") and "RESUME_WITH" not in os.environ:  # no run_accelerate.sh
        hint = ", not DeepSpeed (for ZeRO-2: --deepspeed ds_config.json, with any launcher)"
    optimizer = "AdamW"
    if (engine.deepspeed or {}).get("zero_force_ds_cpu_optimizer") is False:
        optimizer = "PyTorch's AdamW, not DeepSpeed's, which needs ninja and a C++ compiler"
    if args.optimizer == "muon":
        n_matrices = sum(p.shape[:-2].numel() for p in muon_matrices(inputs.shapes))
        matrices = f"Muon on {n_matrices} matrices at learning rate {args.muon_learning_rate:g}"
        optimizer = f"{matrices} and momentum {args.muon_momentum:g}, AdamW on the rest"
    factors = {"embedding": args.embedding_lr_factor, "output layer": args.output_lr_factor}
    for layer, factor in factors.items():
        optimizer += f", {layer} at {factor:g} × its rate" if factor != 1 else ""
    precision = args.matrix_precision
    if engine.strategy.stage and not engine.strategy.fp32_sums and args.dtype != "float32":
        precision += ", gradients added up in 16 bits too"
    teacher = None
    if found := inputs.teacher:
        divided = strategy_of(found.zero).name if found.zero else "whole on each process"
        teacher = f"{found.source.path}: {_parameters(found.shapes)}, {args.dtype}, {divided}"
    expected = estimate(engine.strategy, run.work)
    on_machine = memory(processes_here(engine.processes) * expected.ram)
    in_ram = f"in RAM ({on_machine} on this machine)"
    places = {in_ram: expected.ram, "on NVMe": expected.nvme}
    offloaded = "".join(f", {memory(n)} {place}" for place, n in places.items() if n)
    fields = {
        "run folder": run.folder.path,
        "starts from": checkpoint.name if checkpoint else origin,
        "engine": engine.name + (", one reduction per step" if engine.coalesces else "") + hint,
        "processes": f"{engine.processes} ({run.accelerator.state.backend or 'no process group'})",
        "device": device_name(device),
        "precision": precision,
        "attention": attention,
        "compiled": f"no ({run.why_not_compiled})"
        if run.why_not_compiled
        else "yes (block by block, during the first step)",
        "parameters": _parameters(inputs.shapes),
        "adapters": lora
        and f"LoRA of dim {lora.dim} and alpha {lora.alpha:g} in {lora.module_name!r}; "
        f"{run.work.trained:,} parameters are trained"
        + (", experts are frozen" if inputs.config.use_moe else ""),
        "loss": f"over a micro-batch's targets and 1/{args.sampled_softmax} of the other pieces, "
        "an estimate that is a little too low; in validation over all pieces"
        if args.sampled_softmax > 1
        else None,
        "optimizer": optimizer,
        "data": f"{args.data}: {read}",
        "global batch": f"{counted(batch, rows)} = {batch * data.tokens_per_sample:,.0f} "
        f"tokens per step ({args.batch_size} × {args.accumulation_steps} accumulation × "
        f"{counted(engine.processes, 'processes')})",
        "steps": f"{rate.total_steps:,} ({epochs:.2f} epochs), "
        f"learning rate {args.learning_rate:g} after "
        f"{counted(rate.warmup_steps, 'warm-up steps')}, {rate.schedule}, "
        f"{rate(rate.total_steps):g} in the last step",
        "memory": f"about {memory(expected.peak)} per process expected{offloaded}, plus "
        "up to 1 GiB for Python and PyTorch",
        "teacher": teacher,
        "DeepSpeed": reading_notes(vars(args)) if engine.deepspeed else None,
    }
    return "\n".join(f"{name:>13}: {value}" for name, value in fields.items() if value is not None)


def without_engine(strategy: Strategy, work: Workload) -> str:
    """Return a hint if one process on a GPU would need less memory without its engine, or ""."""
    saved = estimate(strategy, work).peak - estimate(DDP, work).peak
    if work.processes > 1 or work.on_cpu or saved <= 0:
        return ""
    plain = f"`python {work.args.program}` needs about {memory(saved)} less"
    return f"; one process has nothing to divide: {plain}"


def _parameters(shapes: Transformer) -> str:
    """Describe a model: the number of parameters and its shape."""
    config = shapes.config
    total = f"{shapes.num_parameters() / 1e6:.2f} million"
    if config.use_moe:
        total += f", {shapes.num_parameters(active=True) / 1e6:.2f} million per token"
    return (
        f"{total} (dim {config.dim}, "
        f"{counted(config.n_layers, 'layers')}, {counted(config.n_heads, 'heads')}, "
        f"{counted(config.n_kv_heads, 'kv heads')}, vocabulary {config.vocab_size:,})"
    )


def warnings(run: Run) -> list[str]:
    """Return the warnings to print before the first step. Every process must call it."""
    args, inputs, engine, device = run.args, run.inputs, run.engine, run.accelerator.device
    # The process with the least memory decides.
    free = -engine.largest(-available_memory(device, engine.processes))
    ram = -engine.largest(-available_memory(torch.device("cpu"), engine.processes))
    texts = []
    if device.type == "cpu" and args.dtype == "bfloat16" and cpu_emulates_bf16():
        texts.append("WARNING: this CPU emulates bf16: --dtype float32 is many times faster")
    if inputs.val_set is None:
        cause, other = "is shorter than one sequence", "smaller"
        if args.dataset.kind == CONVERSATIONS:
            cause, other = "has no conversation that fits", "larger"
        texts.append(
            f"NO VALIDATION: the validation split {cause} (--max_seq_len "
            f"{inputs.config.max_seq_len}). Pass a {other} --max_seq_len, or prepare the data with "
            "a larger --val_fraction"
        )
    source, n = inputs.source, inputs.config.max_seq_len
    if source and not inputs.start.checkpoint and (most := source.config().max_seq_len) < n:
        text = f"WARNING: {source.path} was trained on {most} positions, but this run has {n}"
        texts.append(f"{text}: pass --max_seq_len {most}, or train long enough to learn the others")
    expected = estimate(engine.strategy, run.work)
    if not fits(engine.strategy, run.work, free):
        needs = f"{memory(expected.peak)} plus a margin"
        advice = less_memory(args, inputs.config.use_flash_attn)
        texts.append(f"WARNING: a process may need {needs}, but has only {memory(free)}: {advice}")
    if expected.ram > ram:
        only = f"only {memory(ram)}"
        text = f"WARNING: each process offloads {memory(expected.ram)} to RAM, but {only} "
        texts.append(f"{text}are free: the system may kill it. Use more GPUs, or NVMe")
    if engine.total(int(not run.folder.path.exists())):
        texts.append(
            f"WARNING: not every machine sees {run.folder.path}, where machine 0 writes: "
            "--resume needs a folder that all machines see"
        )
    return texts
