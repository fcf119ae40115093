"""What is known of a run before its model is built: weights, teacher, data, shape, checkpoint.

Training and the check before a launch (training/preflight.py) take the same steps in the same
order; the check takes them without processes.
"""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from common.errors import SaidError, UsageError
from data.dataset import TokenStream
from data.errors import NothingFitsError
from data.prepared import conversations_out
from model import LMConfig, Transformer
from runs.find import data_of
from training.arguments import TrainingArguments
from training.engine.deepspeed_config import file_of, read_config
from training.engine.deepspeed_schedule import take_schedule
from training.engine.estimate import Workload
from training.engine.launch import Engine
from training.engine.main_process import on_every_process, on_main_process, require_the_same
from training.initial_weights import InitialWeights
from training.optimizer import count_steps
from training.resume import (
    StartingPoint,
    find_starting_point,
    resumed_arguments,
    run_identity,
    with_own_weights,
)
from training.stage_arguments import SFTArguments
from training.teacher import TeacherWeights

# Paths, which may differ between machines, and what the main process decides for all.
OF_A_MACHINE = {
    *("data", "deepspeed", "init_from", "out_dir", "resume", "run_name"),
    *("num_workers", "teacher", "teacher_config", "time_limit"),
}
PREPARE_DATA = Path(__file__).parent.parent / "scripts" / "prepare_data.py"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    args: TrainingArguments  # with data, teacher and the accumulation of a resumed run filled in
    start: StartingPoint
    initial: InitialWeights
    teacher: TeacherWeights | None
    train_set: TokenStream
    val_set: TokenStream | None  # None: no validation
    config: LMConfig
    shapes: Transformer  # the model on the meta device, with its adapters
    identity: dict  # what a run that resumes must have in common, see `run_identity`
    total_steps: int  # of the whole run
    schedule_note: str | None  # what a DeepSpeed file decided of the learning rate

    @property
    def n_trained(self) -> int:
        """Number of parameters that are trained."""
        return sum(p.numel() for p in self.shapes.parameters() if p.requires_grad)

    def workload(self, processes: int, device: torch.device, compiled: bool) -> Workload:
        """Return what a process does in a step, for the estimate of its memory."""
        return Workload(
            args=self.args,
            shapes=self.shapes,
            processes=processes,
            device=device,
            compiled=compiled,
            teacher=self.teacher and self.teacher.beside,
        )


def prepare(
    args: TrainingArguments,
    model_settings: dict,
    engine: Engine | None,
    *,
    processes: int = 1,
    deepspeed: dict | None = None,
) -> Prepared:
    """Find and check everything that a run needs. With an engine all processes must call this.

    Args:
        model_settings: those that were typed.
        engine: None for the check before a launch.
        processes: of the launch that is checked.
        deepspeed: the configuration of that launch; None without DeepSpeed.

    Raises UsageError, ConfigError, DataError: this cannot be trained.
    """
    if engine:
        processes, deepspeed = engine.processes, engine.deepspeed

    def decide() -> tuple:
        start = find_starting_point(args, quiet=engine is None)
        own = with_own_weights(args, start)
        initial = InitialWeights.find(own.init_from, model_settings)
        teacher = TeacherWeights.find(own)
        data = prepared_data(args, initial, teacher)
        return start, initial, teacher, data

    def open_data() -> tuple:
        train_set = filled.dataset(filled.data, "train", initial.max_seq_len)
        try:
            val_set = filled.dataset(filled.data, "val", initial.max_seq_len)
        except NothingFitsError:
            val_set = None
        shapes = shapes_of(initial.config(train_set), filled)
        if teacher:
            teacher.require_fit(train_set, engine)
        return train_set, val_set, shapes, teacher and teacher.source.sha256()

    start, initial, teacher, data = on_main_process(engine, decide)
    source = file_of(args)
    file = read_config(source) if deepspeed and source != "none" else None
    filled, schedule_note = take_schedule(file, args, source=source)
    filled = replace(filled, data=args.data or data)  # each process keeps its own path
    if teacher:
        filled = replace(filled, teacher=str(teacher.source.path))
    train_set, val_set, shapes, sha256 = on_every_process(engine, open_data)
    identity = run_identity(train_set, filled, processes, sha256)
    if engine:
        flags = {f"--{k}": v for k, v in vars(args).items() if k not in OF_A_MACHINE}
        facts = {"engine": engine.name} | flags | shapes.config.shape() | identity
        require_the_same(engine, facts | (deepspeed or {}))
    if start.checkpoint:
        filled, identity = resumed_arguments(start, filled, shapes, identity, processes)
    return Prepared(
        args=filled,
        start=start,
        initial=initial,
        teacher=teacher,
        train_set=train_set,
        val_set=val_set,
        config=shapes.config,
        shapes=shapes,
        identity=identity,
        total_steps=count_steps(filled, len(train_set), processes),
        schedule_note=schedule_note,
    )


def prepared_data(
    args: TrainingArguments, initial: InitialWeights, teacher: TeacherWeights | None
) -> str:
    """Return --data; prepare the built-in corpus, and conversations, which need the tokenizer of
    the weights. Raises SaidError, UsageError: the preparation failed, or flags contradict."""
    if isinstance(args, SFTArguments) and args.data is None:
        tokenizer = initial.source.tokenizer
        folder = str(conversations_out(args.conversations, tokenizer, args.prepare_flags))
        flags = ["--conversations", args.conversations, "--tokenizer", str(tokenizer)]
        flags += ["--overwrite", f"--flags={args.prepare_flags}"]
    elif isinstance(args, SFTArguments) and (args.conversations != "builtin" or args.prepare_flags):
        raise UsageError(
            "--data is a folder that has been prepared, --conversations and --prepare_flags "
            "prepare one: give either"
        )
    elif args.data is None:
        return data_of(str(teacher.source.path))
    elif args.data == TrainingArguments.data and not Path(args.data).exists():
        print(f"no packed data in {args.data} yet: preparing the built-in corpus", flush=True)
        folder, flags = args.data, ["--data", "builtin"]
    else:
        return args.data
    command = [sys.executable, str(PREPARE_DATA), *flags, "--out", folder]
    if subprocess.run(command, stdout=2).returncode:  # preflight prints flags, and nothing else
        raise SaidError(f"{folder}: the data could not be prepared")
    return folder


def shapes_of(config: LMConfig, args: TrainingArguments) -> Transformer:
    """Return the model on the meta device. Raises ConfigError: it cannot have these adapters."""
    with torch.device("meta"):
        shapes = Transformer(config)
        args.adapt(shapes)
    return shapes
