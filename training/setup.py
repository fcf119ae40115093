"""What a training program builds before its first step; each function returns what it made."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from common.errors import SaidError, UsageError
from data.dataset import PackedDataset
from data.prepared import conversations_out
from data.shards import CONVERSATIONS
from model import LMConfig, Transformer
from model.lora import LoRA
from model.transformer import flops_per_token
from runs.find import data_of
from training.arguments import Arguments, TrainingArguments
from training.engine.compilation import Compilation, compile_blocks, decide_compilation
from training.engine.kinds import kind_of
from training.engine.launch import KEPT, Engine, spare_overflow_check
from training.engine.main_process import on_every_process, on_main_process, require_the_same
from training.engine.memory import ram_warning
from training.engine.operations import compile_operations
from training.engine.state import TrainingState
from training.engine.workload import Beside, Workload
from training.engine.zero_3 import claim_folders, divided_as_built, require_buffers
from training.initial_weights import InitialWeights
from training.optimizer import build_optimizer, muon_matrices, tell_layout
from training.resume import StartingPoint, choose_run, resumed_arguments, run_identity
from training.sft_arguments import SFTArguments

# Paths, which may differ between machines, and what the main process decides for all.
OF_A_MACHINE = {
    *("data", "deepspeed", "init_from", "out_dir", "resume", "run_name"),
    *("num_workers", "teacher", "teacher_config", "time_limit"),
}
PREPARE_DATA = Path(__file__).parent.parent / "scripts" / "prepare_data.py"


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed torch's generators, the only ones that training uses; another rank, other numbers."""
    torch.manual_seed(seed + 1000003 * rank)


def open_splits(
    args: TrainingArguments, seq_len: int, engine: Engine
) -> tuple[PackedDataset, PackedDataset | None]:
    """Training and validation split of --data, as the program's kind of data set. Raises DataError:
    anything wrong with the prepared data."""

    def attempt() -> tuple[PackedDataset, PackedDataset | None]:
        train_set = args.dataset(args.data, "train", seq_len)
        if engine.accelerator.is_local_main_process:
            train_set.scan()
        has_val = args.dataset.fits(args.data, "val", seq_len)
        return train_set, args.dataset(args.data, "val", seq_len) if has_val else None

    train_set, val_set = on_every_process(engine, attempt)
    if val_set is None:
        why, other = "the split is shorter than one sequence of", "smaller"
        if args.dataset.kind == CONVERSATIONS:
            why, other = "no answer of the split ends within", "larger"
        engine.accelerator.print(
            f"NO VALIDATION: {why} {seq_len} tokens; prepare the data with a larger "
            f"--val_fraction, or train with a {other} --max_seq_len"
        )
    return train_set, val_set


def with_data(args: Arguments, initial: InitialWeights) -> Arguments:
    """The arguments with --data: that of a teacher, or prepared first where that is this program's
    to do and has not happened yet: the built-in corpus, and conversations, which go by the
    tokenizer of the weights. Raises SaidError: that failed. UsageError: flags that contradict each
    other; the weights have no tokenizer, or nothing tells what the teacher was trained on."""
    if isinstance(args, SFTArguments) and args.data is None:
        tokenizer = initial.source.tokenizer
        folder = str(conversations_out(args.conversations, tokenizer, args.prepare_flags))
        flags = ["--conversations", args.conversations, "--tokenizer", str(tokenizer)]
        flags += ["--overwrite", *args.prepare_words()]
    elif isinstance(args, SFTArguments) and args.says_how_to_prepare():
        raise UsageError(
            "--data is a folder that has been prepared, --conversations and --prepare_flags "
            "prepare one: give either"
        )
    elif args.data is None:
        return replace(args, data=data_of(args.teacher))
    elif args.data == TrainingArguments.data and not Path(args.data).exists():
        print(f"no packed data in {args.data} yet: preparing the built-in corpus", flush=True)
        folder, flags = args.data, ["--data", "builtin"]
    else:
        return args
    command = [sys.executable, str(PREPARE_DATA), *flags, "--out", folder]
    if subprocess.run(command, stdout=2).returncode:  # preflight prints flags, and nothing else
        raise SaidError(f"{folder}: the data could not be prepared")
    return replace(args, data=folder)


def find_start(
    args: TrainingArguments,
    config: LMConfig,
    train_set: PackedDataset,
    engine: Engine,
    teacher: str | None = None,
) -> tuple[StartingPoint, TrainingArguments]:
    """The run folder, locked, with the checkpoint to go on from if --resume asks for one; and the
    arguments with which the run then is the one that was saved, see `resumed_arguments`.

    Raises UsageError, ConfigError: nothing to resume, a run that differs, or a machine that was
    started with other flags or data.
    """
    flags = {f"--{name}": value for name, value in vars(args).items() if name not in OF_A_MACHINE}
    identity = run_identity(train_set, args, engine.processes)
    of_data = {name: identity[name] for name in ("data", "tokenizer")}
    facts = {"engine": engine.name} | flags | config.shape() | of_data | (engine.deepspeed or {})
    require_the_same(engine, facts)
    start = on_main_process(engine.accelerator, lambda: choose_run(args))
    if start.checkpoint is None:
        return start, args
    return start, resumed_arguments(start, args, config, train_set, engine.processes, teacher)


def plan_compilation(
    args: TrainingArguments,
    config: LMConfig,
    start: StartingPoint,
    steps: int,
    engine: Engine,
    train_set: PackedDataset,
) -> Compilation:
    """Whether to compile a run of so many steps. Raises UsageError: --compile on, but compiling
    does not work here."""
    samples = args.batch_size * args.accumulation_steps * steps  # per process
    tokens = samples * train_set.tokens_per_sample
    run_flops = flops_per_token(config) * tokens
    recorded = start.state.get("compiled")
    return decide_compilation(
        args.compile, recorded, run_flops, engine.accelerator, engine.divides_model
    )


def shapes_of(
    config: LMConfig, adapt: Callable[[Transformer], object] = lambda model: None
) -> Transformer:
    """The model without numbers, to be counted. Raises ConfigError: `adapt` cannot do its work."""
    with torch.device("meta"):
        shapes = Transformer(config)
        adapt(shapes)
    return shapes


def warn_of_ram(
    args: TrainingArguments, config: LMConfig, engine: Engine, teacher: Beside | None = None
) -> None:
    """Before student and teacher are built, say once on each machine that RAM will not do."""
    work = Workload.of(
        args,
        config,
        processes=engine.processes,
        device=engine.accelerator.device,
        lora=shapes_of(config, args.adapt).lora,
        teacher=teacher,
    )
    warning = ram_warning(kind_of(engine.deepspeed, config.dim), work)
    if warning and engine.accelerator.is_local_main_process:
        print(warning, flush=True)


@dataclass
class BuiltModel:
    config: LMConfig
    compilation: Compilation
    model: nn.Module  # as prepared for the engine, like the optimizer
    optimizer: torch.optim.Optimizer
    state: TrainingState  # of both
    n_parameters: int
    n_trained: int  # of these; fewer where some are frozen
    lora: LoRA | None  # its adapters
    flops_per_token: Callable[[float], float]  # see `Transformer.flops_per_token`
    n_muon_matrices: int
    n_muon_parameters: int  # stepped by Muon


def build_model(
    config: LMConfig,
    args: TrainingArguments,
    engine: Engine,
    compilation: Compilation,
    adapt: Callable[[Transformer], object] = lambda model: None,
) -> BuiltModel:
    """A model with weights drawn at random and its optimizer, both prepared for the engine; the
    random generators are seeded for what comes after.

    Args:
        adapt: changes the model as soon as it is there, by `add_lora` for instance. Parameters that
            it freezes are held in the precision of forward and backward, under every engine.
    """
    accelerator = engine.accelerator
    shapes = shapes_of(config, adapt)  # an engine may leave nothing of the model's own
    n_trained = sum(p.numel() for p in shapes.parameters() if p.requires_grad)
    matrices = muon_matrices(shapes) if args.optimizer == "muon" else []
    n_muon_parameters = sum(matrix.numel() for matrix in matrices)
    engine.fit_to(config.dim, n_trained)
    require_buffers(engine.kind, shapes, engine.processes, getattr(torch, args.dtype).itemsize)
    claim_folders(engine)
    compile_operations(engine)
    seed_everything(args.seed)  # the same initial weights on every process
    with divided_as_built(engine):
        model = Transformer(config)
        adapt(model)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, args.dtype))
    for block in model.layers:
        block.recompute = args.gradient_checkpointing
    if compilation.on:
        compile_blocks(model)
    optimizer = build_optimizer(model, args, engine)
    try:
        model, optimizer = accelerator.prepare(model, optimizer)
    except (ValueError, AssertionError) as error:  # what DeepSpeed has against its configuration
        raise UsageError(f"the engine cannot be started: {error}") from error
    if engine.processes > 1:
        KEPT.append(model)
    tell_layout(model, engine)
    if engine.zero_stage in (1, 2):
        spare_overflow_check(model.optimizer)
    seed_everything(args.seed, rank=accelerator.process_index)  # other dropout masks on each
    return BuiltModel(
        config=config,
        compilation=compilation,
        model=model,
        optimizer=optimizer,
        state=TrainingState(engine, model, optimizer),
        n_parameters=shapes.num_parameters(),
        n_trained=n_trained,
        lora=shapes.lora,
        flops_per_token=shapes.flops_per_token,
        n_muon_matrices=len(matrices),
        n_muon_parameters=n_muon_parameters,
    )
