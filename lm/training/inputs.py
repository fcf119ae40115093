"""Find and check the weights, teacher, data and checkpoint of a run, before its model is built."""

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from lm.common.errors import ReportedError, UsageError
from lm.data.conversation_set import ConversationRows, ConversationSet
from lm.data.conversations import CHAT_SUFFIXES
from lm.data.corpus import find_files
from lm.data.dataset import NothingFitsError, TokenStream
from lm.data.prepare import conversations_out
from lm.data.shards import CONVERSATIONS, read_description
from lm.engine.agreement import on_every_process, on_main_process, require_the_same
from lm.engine.engine import Engine
from lm.engine.memory import Workload
from lm.storage.find import PRETRAINING, data_of
from lm.storage.folder import read_settings
from lm.storage.weights import WeightsFolder
from lm.training.arguments import SFTArguments, TrainingArguments
from lm.training.distillation import TeacherWeights, require_same_tokenizer
from lm.training.resume import require_same_run, run_identity, with_global_batch
from lm.training.starting_point import StartingPoint, find_starting_points
from model import LMConfig, Transformer
from model.config import HOW_IT_COMPUTES
from model.lora import LoRALinear

REPOSITORY = Path(__file__).parents[2]
# Flags that may differ between machines.
OF_A_MACHINE = {
    *("data", "deepspeed", "init_from", "out_dir", "resume", "run_name"),
    *("num_workers", "teacher", "teacher_config", "threads", "time_limit"),
}
# Settings that may differ from those of the initial weights: they change no weight's shape.
MAY_DIFFER = (*HOW_IT_COMPUTES, "max_seq_len")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    args: TrainingArguments  # with paths filled in; a resume may change accumulation_steps
    start: StartingPoint
    source: WeightsFolder | None  # the initial weights, or None: they are random
    teacher: TeacherWeights | None
    train_set: TokenStream
    val_set: TokenStream | None  # None: no validation
    config: LMConfig
    shapes: Transformer  # the model on the meta device, with its adapters
    identity: dict  # facts that must stay the same at a resume, see `run_identity`
    total_steps: int  # of the whole run

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs per token: forward and backward, and the forward pass of a teacher."""
        length = self.train_set.tokens_per_sample
        teacher = self.teacher.shapes.flops_per_token(length) / 3 if self.teacher else 0
        return self.shapes.flops_per_token(length) + teacher

    def workload(self, processes: int, device: torch.device, compiled: bool) -> Workload:
        """Return the work of one process in a step, for the memory estimate."""
        return Workload(
            args=self.args,
            shapes=self.shapes,
            processes=processes,
            device=device,
            compiled=compiled,
            masked=self.train_set.kind == CONVERSATIONS,
            teacher=self.teacher and self.teacher.shapes,
            teacher_config=self.teacher and self.teacher.zero,
        )


def find_inputs(
    args: TrainingArguments,
    model_settings: dict,
    engine: Engine | None,
    processes: int = 1,
    start: StartingPoint | None = None,
) -> Inputs:
    """Find and check everything that a run needs. Every process must call it. Before a launch
    `engine` and `start` are None. Raises UsageError or ConfigError if a check fails."""
    processes = engine.processes if engine else processes
    start = start or find_starting_points([args])[0]
    choose = partial(choose_sources, args, model_settings, start)
    source, teacher, settings, data = on_main_process(engine, choose)
    found = {"data": args.data or data} | ({"teacher": str(teacher.source.path)} if teacher else {})
    # Machines may have different paths and threads.
    filled = replace(args, threads=torch.get_num_threads(), **found)
    filled = with_global_batch(start, filled, processes)

    def open_data() -> tuple:
        train_set, val_set = open_splits(filled, settings)
        if source:
            require_same_tokenizer(source, train_set)
        if teacher:
            teacher.require_fit(train_set, engine)
        shapes = shapes_of(LMConfig(**{"vocab_size": train_set.vocab_size} | settings), filled)
        require_fitting_flags(filled, shapes, train_set)
        return train_set, val_set, shapes, teacher and teacher.source.sha256()[:16]

    train_set, val_set, shapes, sha256 = on_every_process(engine, open_data)
    identity = run_identity(train_set, filled, processes, sha256)
    if engine:
        flags = {f"--{k}": v for k, v in vars(args).items() if k not in OF_A_MACHINE}
        facts = {"engine": engine.name} | flags | shapes.config.to_dict() | identity
        require_the_same(engine, facts | (engine.deepspeed or {}))
    require_same_run(start, shapes, identity)
    return Inputs(
        args=filled,
        start=start,
        source=source,
        teacher=teacher,
        train_set=train_set,
        val_set=val_set,
        config=shapes.config,
        shapes=shapes,
        identity=identity,
        total_steps=filled.total_steps(train_set.samples_per_epoch, processes),
    )


def open_splits(
    args: TrainingArguments, model_settings: dict
) -> tuple[TokenStream, TokenStream | None]:
    """Return the training and the validation data; None if no validation sample fits."""
    seq_len = model_settings.get("max_seq_len", LMConfig.max_seq_len)
    read = args.dataset  # distillation finds it in a file
    train_set = (ConversationRows if read is ConversationSet else read)(args.data, "train", seq_len)
    try:
        return train_set, read(args.data, "val", seq_len)
    except NothingFitsError:
        return train_set, None


def require_fitting_flags(
    args: TrainingArguments, shapes: Transformer, train_set: TokenStream
) -> None:
    """Raise UsageError if a training flag does not suit the model or the data."""
    config, parts = shapes.config, args.sampled_softmax
    if config.tie_embeddings and args.output_lr_factor != 1:
        raise UsageError(
            "--output_lr_factor has no effect on a tied matrix: use --no-tie_embeddings"
        )
    sizes = (config.dim, config.moe_hidden_dim)
    if config.use_moe and args.dtype != "float32" and any(size % 8 for size in sizes):
        # PyTorch's grouped products of 16-bit numbers need rows of 16, 32, ... bytes.
        needs = "need sizes that 8 divides, not (dim, moe_hidden_dim) ="
        raise UsageError(f"experts in {args.dtype} {needs} {sizes}")
    if args.token_noise and (args.teacher or not train_set.n_first):
        needs = "a text in several segmentations (docs/data.md) and no teacher"
        raise UsageError(f"--token_noise {args.token_noise:g} needs {needs}")
    whole = args.teacher or isinstance(shapes.output, LoRALinear)
    if parts > 1 and (whole or parts > config.vocab_size):
        without = f"with a teacher, adapters of the output layer or fewer than {parts:,} pieces"
        raise UsageError(f"--sampled_softmax {parts} has no meaning {without}: leave it out")


def choose_sources(args: TrainingArguments, model_settings: dict, start: StartingPoint) -> tuple:
    """Return a run's initial weights, teacher, model settings and data folder."""
    out, initial = Path(args.out_dir), args.init_from
    if start.checkpoint and initial:  # weights in the run folder: --init_from may be gone
        initial = str(start.folder.base if start.folder.base.exists() else start.checkpoint)
    source = initial and WeightsFolder.find(initial, out, PRETRAINING)
    settings = source_settings(source, model_settings)
    teacher = None
    if args.teacher:
        teacher = TeacherWeights.find(args)
        length = teacher.shapes.config.max_seq_len
        if teacher.source.is_foreign:  # Hugging Face's models may read more than one can train
            length = min(length, LMConfig.max_seq_len)
        settings = {"max_seq_len": length} | settings
    return source, teacher, settings, prepared_data(args, start, source, teacher)


def prepared_data(
    args: TrainingArguments,
    start: StartingPoint,
    source: WeightsFolder | None,
    teacher: TeacherWeights | None,
) -> str:
    """Return the folder of prepared data; prepare conversations or a missing built-in corpus first.
    Raises UsageError if this fails, or if flags contradict each other or the resumed run."""
    if isinstance(args, SFTArguments) and args.data is None:
        tokenizer = source.tokenizer
        folder = str(conversations_out(args.conversations, tokenizer))
        own = read_settings(start.folder.settings).get("arguments", {}).get("data")
        if start.checkpoint and own and Path(own).exists():
            files, named = find_files(args.conversations, CHAT_SUFFIXES), "--conversations"
            require_text_of_run(named, files, Path(folder), own, start.folder.path)
            return own
        flags = ["--conversations", args.conversations, "--tokenizer", str(tokenizer)]
    elif getattr(args, "conversations", "builtin") != "builtin" and not start.checkpoint:
        raise UsageError("--data is prepared data, --conversations is data to prepare: give one")
    elif args.data is None:
        return data_of(teacher.source.path)
    elif args.data == TrainingArguments.data and not Path(args.data).exists():
        folder, flags = args.data, ["--data", "builtin"]
    else:
        return args.data
    flags += ["--out", folder, "--reuse"]  # --reuse accepts data with other settings
    command = [sys.executable, "-m", "scripts.prepare_data", *flags]
    search = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environ = os.environ | {"PYTHONPATH": search}
    if subprocess.run(command, stdout=2, env=environ).returncode:  # stdout is for preflight's flags
        print(f"try: python -m scripts.prepare_data {shlex.join(flags)}", file=sys.stderr)
        raise ReportedError(f"{folder}: the data could not be prepared")
    return folder


def require_text_of_run(named: str, files: list[str], folder: Path, data: str, run: Path) -> None:
    """Raise UsageError unless `data`, the data of a resumed run, was prepared from these files, for
    which `folder` is the prepared data. `named` are the settings that name the files."""
    then = read_description(Path(data)).get("prepared_from", {})
    now = (folder.resolve(), len(files), sum(map(os.path.getsize, files)))
    if now != (Path(data).resolve(), then.get("files"), then.get("bytes_on_disk")):
        raise UsageError(
            f"{named}: not what {run} was trained on; its data stays in {data}. To go on with it, "
            f"pass --data {data} instead. To train on other data, start a new run with --init_from "
            f"{run}, in pretraining also with PREPARE_FLAGS='--tokenizer {data}'"
        )


def source_settings(source: WeightsFolder | None, typed: dict) -> dict:
    """Return the model settings of the weights (if any), updated by the typed settings. Raises
    UsageError if a typed setting contradicts the weights, ConfigError if the shape is invalid."""
    config = source and source.config()
    theirs = config.shape() if config else {}
    for name, value in typed.items():
        if config and name not in MAY_DIFFER and value != getattr(config, name):
            shape = f"{source.path} has {getattr(config, name)}"
            raise UsageError(f"--{name} {value}: leave it out, {shape}")
    LMConfig(**theirs | typed)
    return theirs | typed


def shapes_of(config: LMConfig, args: TrainingArguments) -> Transformer:
    """Return the model on the meta device. Raises ConfigError if adapters do not fit."""
    with torch.device("meta"):
        shapes = Transformer(config)
        args.adapt(shapes)
    return shapes
