"""Set up a training program: from the command line to a `Run` that is ready to train."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState

from common.errors import UsageError, one_line_errors
from common.numbers import counted, memory
from data.shards import CONVERSATIONS
from model import ConfigError, Transformer
from storage.checkpoint import write_base
from storage.folder import claim, release_locks
from training.arguments import TrainingArguments, as_arguments, build_parser
from training.build import random_state
from training.engine.device import (
    attention_kernel,
    available_memory,
    cpu_emulates_bf16,
    device_name,
    matrix_precision,
)
from training.engine.estimate import DDP, Kind, Workload, estimate, fits, kind_of
from training.engine.launch import Engine, build_engines
from training.engine.launcher_settings import reading_notes, with_launcher_settings
from training.engine.main_process import on_every_process, on_main_process
from training.interruption import LIVES_ON, SIGNALS, StopRequest, exit_rank
from training.log import require_trackers
from training.optimizer import muon_matrices
from training.prepare import Prepared, prepare
from training.resume import changes_since_stop, set_aside, write_settings
from training.run import Run

# Parts of messages: OUT_OF_MEMORY are from PyTorch, NCCL and cuBLAS, the others from gloo and NCCL.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
ENDED = ("Connection closed", "Connection reset", "Broken pipe", "remote process exited")
SILENT = ("Connection timed out", "Timed out waiting")


def run_program(
    kind: type[TrainingArguments],
    train: Callable[[Any], None],
    argv: list[str] | None,
    make: Callable[[TrainingArguments, dict], Any] | None = None,
) -> None:
    """Set up a run and train it, unless it is finished. If `argv` is None, take the flags of the
    command line, and end with `exit_rank`. With `argv`, as in a notebook, the process goes on.
    `make` (default: `set_up`) returns the argument of `train`, or None if the run is finished."""
    process = nullcontext() if argv is None else notebook_process([kind.program, *argv])
    try:
        with one_line_errors(kind.program, UsageError, ConfigError), process:
            typed = vars(build_parser(kind).parse_args(argv))
            args, model_settings = as_arguments(with_launcher_settings(typed), kind)
            with one_line_failures(args, model_settings):
                subject = (make or set_up)(args, model_settings)
                if subject is not None:
                    train(subject)
    finally:
        if argv is None:
            exit_rank()


@contextmanager
def notebook_process(command: list[str]) -> Iterator[None]:
    """Context in which sys.argv is `command`. Afterwards the process can begin another run."""

    def forget_models() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)  # allows another precision
        GradientState._reset_state()
        if "torch._dynamo" in sys.modules:  # delete compiled code of earlier runs
            torch.compiler.reset()

    typed, sys.argv = sys.argv, command
    environ = os.environ.copy()  # the run adds variables that name its engine
    os.environ[LIVES_ON] = "1"
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    forget_models()
    try:
        yield
    finally:
        forget_models()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        release_locks()
        os.environ.clear()
        os.environ.update(environ)
        sys.argv = typed


@contextmanager
def one_line_failures(args: TrainingArguments, model_settings: dict) -> Iterator[None]:
    """Turn three kinds of failure in this context into an error of one line. Raises UsageError if
    memory ran out, a C++ compiler failed, or another process ended or does not answer."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        sentences = text.split(". ")
        if isinstance(error, MemoryError) or any(part in text for part in OUT_OF_MEMORY):
            advice = less_memory(args, model_settings.get("use_flash_attn", True))
            # Keep PyTorch's first three sentences: the requested size and the GPU's free memory.
            sizes = ". ".join(sentences[:3]) or "MemoryError"
            raise UsageError(
                f"out of memory with --batch_size {args.batch_size} --accumulation_steps "
                f"{args.accumulation_steps}: {advice} ({sizes})"
            ) from error
        if "C++ compile error" in text:  # Ctrl-C in a terminal also ends the compiler
            output = text.partition("Output:\n")[2].partition("Set TORCH")[0].strip() or "no output"
            said = f"the C++ compiler was stopped or failed ({output.splitlines()[0]})"
            raise UsageError(f"{said}; --compile off needs no compiler") from error
        if any(part in text for part in ENDED):
            what = "has ended, see its output"
        elif any(part in text for part in SILENT):
            what = "does not answer any more"
        else:
            raise
        raise UsageError(f"another process {what} ({sentences[0]}); use --resume auto") from error


def set_up(args: TrainingArguments, model_settings: dict) -> Run | None:
    """Return a run that is ready to train, or None if it is finished. Raises UsageError or
    ConfigError if the run cannot be trained."""
    return next(iter(set_up_together([(args, model_settings)])), None)


def set_up_together(
    models: list[tuple[TrainingArguments, dict]], resumed: Callable[[], list] | None = None
) -> dict[Run, dict]:
    """Set up runs that read the same batches. Return a dict: unfinished run → its random state. The
    main process calls `resumed`, if given, which returns the value of --resume for each run."""
    started, first = time.monotonic(), models[0][0]  # --time_limit counts from here
    require_trackers(first.trackers)
    engines = build_engines([args for args, _ in models])
    if resumed:
        paths = on_main_process(engines[0], resumed)
        pairs = zip(models, paths, strict=True)
        models = [(replace(args, resume=path), settings) for (args, settings), path in pairs]
    pairs = zip(models, engines, strict=True)
    prepared = [prepare(args, settings, engine) for (args, settings), engine in pairs]
    batches = {(x.config.max_seq_len, x.args.global_batch(1), x.total_steps) for x in prepared}
    if len(batches) > 1:
        raise UsageError(f"models differ in (max_seq_len, sequences per process, steps): {batches}")
    stop = StopRequest(engines[0], first.time_limit, first.save_minutes, since=started)
    runs = {}
    for each, engine in zip(prepared, engines, strict=True):
        select_engine(engine)
        name = each.args.run_name if len(models) > 1 else ""
        if run := start_run(each, engine, stop, name):
            runs[run] = random_state(engine.accelerator.device)
    for run in runs:  # rename checkpoints and write settings after all runs are set up
        if run.engine.is_main:
            set_aside(run.prepared.start)
            tokenizer = run.prepared.train_set.tokenizer_path
            write_settings(run.folder, run.args, run.prepared.config, run.engine, tokenizer)
        run.log.open()
    if not runs:
        engines[0].accelerator.end_training()
    return runs


def select_engine(engine: Engine) -> None:
    """Make Accelerate use the DeepSpeed configuration of this engine."""
    if engine.plugin is not None:
        engine.accelerator.state.select_deepspeed_plugin(engine.plugin)


def start_run(prepared: Prepared, engine: Engine, stop: StopRequest, name: str) -> Run | None:
    """Build the model, load weights, print the start block; return None if the run is finished.
    Every process must call it. Raises UsageError or ConfigError if the run cannot be trained."""
    args, start, train_set = prepared.args, prepared.start, prepared.train_set
    on_main_process(engine, partial(claim, start.folder))  # a new folder is not yet locked
    engine.set_accumulation(args.accumulation_steps)
    finished = start.step >= prepared.total_steps
    if finished and on_main_process(engine, start.folder.weights.exists):
        steps = f"{start.step} of {prepared.total_steps} steps"
        engine.accelerator.print(f"{start.folder.path} is finished, {steps}: raise --max_steps")
        return None
    run = Run(prepared, engine, stop, name)
    if prepared.source and not start.checkpoint:
        model = on_every_process(engine, prepared.source.load)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        run.state.load_weights(weights, str(prepared.source.path))
        if prepared.shapes.lora:  # the run folder needs the frozen weights too
            keep = (start.folder, prepared.config, weights, train_set.tokenizer_path)
            on_main_process(engine, partial(write_base, *keep))
    changes = changes_since_stop(start, args, prepared.config, engine)
    for text in (start_block(run), *changes, *warnings(run)):
        run.log.say(text)
    return run


def start_block(run: Run) -> str:
    """Return the facts of a run, one per line, with aligned names."""
    args, engine, prepared, rate = run.args, run.engine, run.prepared, run.learning_rate
    device, data, batch = run.accelerator.device, prepared.train_set, run.samples_per_step
    lora, checkpoint = prepared.shapes.lora, prepared.start.checkpoint
    origin = f"{prepared.source.path}, with a new optimizer" if prepared.source else "scratch"
    rows, read = "sequences", f"{data.n_tokens:,} tokens, {len(data):,} sequences of {data.seq_len}"
    if (n := prepared.samples_per_epoch) < len(data):
        ways = f"{n:,} sequences in {data.segmentations} segmentations"
        read = f"{data.n_tokens:,} tokens, {ways}, {data.seq_len} tokens each"
    if data.lengths is not None:
        rows, read = "conversations", data.summary
    if run.val_loader:
        read += f"; validation on {len(run.val_loader.dataset):,} {rows}"
    epochs = rate.total_steps * batch / prepared.samples_per_epoch
    hint = without_engine(engine.kind, run.work)
    if engine.name.startswith("DDP") and "RESUME_WITH" not in os.environ:  # no run_accelerate.sh
        hint = ", not DeepSpeed (for ZeRO-2: --deepspeed ds_config.json, with any launcher)"
    optimizer = "AdamW"
    if (engine.deepspeed or {}).get("zero_force_ds_cpu_optimizer") is False:
        optimizer = "PyTorch's AdamW, not DeepSpeed's, which needs ninja and a C++ compiler"
    if args.optimizer == "muon":
        n_matrices = sum(p.shape[:-2].numel() for p in muon_matrices(prepared.shapes))
        matrices = f"Muon on {n_matrices} matrices at learning rate"
        optimizer = f"{matrices} {args.muon_learning_rate:g}, AdamW on the rest"
    precision = matrix_precision(run.accelerator.mixed_precision)
    if engine.kind.stage and not engine.kind.fp32_sums and args.dtype != "float32":
        precision += ", gradients added up in 16 bits too"
    teacher = None
    if found := prepared.teacher:
        divided = kind_of(found.zero).name if found.zero else "whole on each process"
        teacher = (
            f"{found.source.path}: {_parameters(found.shapes)}, {args.dtype}, {divided}, "
            f"{run.teacher.held / 1e6:,.1f} MB of weights per process"
        )
    expected = estimate(engine.kind, run.work)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", engine.processes))  # processes on this machine
    in_ram = f"in RAM ({memory(local * expected.ram)} on this machine)"
    places = {in_ram: expected.ram, "on NVMe": expected.nvme}
    offloaded = "".join(f", {memory(n)} {place}" for place, n in places.items() if n)
    fields = {
        "run folder": run.folder.path,
        "starts from": checkpoint.name if checkpoint else origin,
        "engine": engine.name + (", one reduction per step" if engine.coalesces else "") + hint,
        "processes": f"{engine.processes} ({run.accelerator.state.backend or 'no process group'})",
        "device": device_name(device),
        "precision": precision,
        "attention": attention_kernel(prepared.config, getattr(torch, args.dtype), device),
        "compiled": f"no ({run.why_not_compiled})"
        if run.why_not_compiled
        else "yes (block by block, during the first step)",
        "parameters": _parameters(prepared.shapes),
        "adapters": lora
        and f"LoRA of dim {lora.dim} and alpha {lora.alpha:g} in {lora.module_name!r}; "
        f"{run.work.trained:,} parameters are trained"
        + (", experts are frozen" if prepared.config.use_moe else ""),
        "optimizer": optimizer,
        "data": f"{args.data}: {read}",
        "global batch": f"{batch:,} sequences = {batch * data.tokens_per_sample:,.0f} tokens per "
        f"step ({args.batch_size} × {args.accumulation_steps} accumulation × {engine.processes} "
        "processes)",
        "steps": f"{rate.total_steps:,} ({epochs:.2f} epochs), "
        f"learning rate {args.learning_rate:g} after {rate.warmup_steps:,} warm-up steps, "
        f"{rate.schedule}",
        "memory": f"about {memory(expected.peak)} per process expected{offloaded}, plus "
        "up to 1 GiB for Python and PyTorch",
        "teacher": teacher,
        "DeepSpeed": reading_notes(vars(args)) if engine.deepspeed else None,
    }
    return "\n".join(f"{name:>13}: {value}" for name, value in fields.items() if value is not None)


def without_engine(kind: Kind, work: Workload) -> str:
    """Return a hint if one process on a GPU would need less memory without its engine, or ""."""
    saved = estimate(kind, work).peak - estimate(DDP, work).peak
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
    args, prepared, engine, device = run.args, run.prepared, run.engine, run.accelerator.device
    # The smallest of all processes:
    free = -engine.largest(-available_memory(device, engine.processes))
    ram = -engine.largest(-available_memory(torch.device("cpu"), engine.processes))
    texts = []
    if device.type == "cpu" and args.dtype == "bfloat16" and cpu_emulates_bf16():
        texts.append("WARNING: this CPU emulates bf16: --dtype float32 is many times faster")
    if prepared.val_set is None:
        other = "larger" if args.dataset.kind == CONVERSATIONS else "smaller"
        texts.append(
            "NO VALIDATION: prepare the data with a larger --val_fraction, or train with a "
            f"{other} --max_seq_len than {prepared.config.max_seq_len}"
        )
    source, n = prepared.source, prepared.config.max_seq_len
    if source and not prepared.start.checkpoint and (most := source.config().max_seq_len) < n:
        text = f"WARNING: {source.path} was trained on {most} positions, this run has {n}"
        texts.append(f"{text}: pass --max_seq_len {most}, or train long enough to learn the others")
    if not fits(engine.kind, run.work, free):
        needs = f"{memory(estimate(engine.kind, run.work).peak)} plus a margin"
        advice = less_memory(args, prepared.config.use_flash_attn)
        texts.append(f"WARNING: a process may need {needs}, but has only {memory(free)}: {advice}")
    if (offloaded := estimate(engine.kind, run.work).ram) > ram:
        text = f"WARNING: each process offloads {memory(offloaded)} to RAM, but only {memory(ram)} "
        texts.append(f"{text}are free for it: the system may kill it; take more GPUs or NVMe")
    if engine.total(int(not run.folder.path.exists())):
        texts.append(
            f"WARNING: not every machine sees {run.folder.path}, where machine 0 writes: "
            "--resume needs a folder that all machines see"
        )
    return texts


def less_memory(args: TrainingArguments, use_flash_attn: bool) -> str:
    """Return advice: the flags that reduce the memory of a run."""
    ways = ["a smaller --batch_size with larger --accumulation_steps", "a shorter --max_seq_len"]
    if args.gradient_checkpointing != "blocks":
        ways.append("--gradient_checkpointing blocks")
    if not use_flash_attn:
        ways.append("--use_flash_attn")
    return f"{', '.join(ways)} need less memory"
