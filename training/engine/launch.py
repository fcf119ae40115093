"""Who does the training: DeepSpeed, DistributedDataParallel or a single process, as launched.

Accelerate decides by environment variables that its launcher sets. This module says or refuses what
Accelerate would do without a word: a precision that is ignored, a number of processes that does not
come about, DeepSpeed switched off.
"""

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
)
from torch import nn
from torch.distributed import ProcessGroup, ReduceOp

from common.errors import UsageError
from training.arguments import TrainingArguments
from training.engine.cpu_settings import keep_freed_memory, use_all_cores
from training.engine.deepspeed_config import (
    file_of,
    fill_by_width,
    offload_device,
    read_config,
    resolve,
)
from training.engine.device import has_bf16, has_tf32, require_usable_gpu
from training.engine.environment import name_interface, take_launch
from training.engine.kinds import Kind, kind_of

# Process groups, and what holds one, to the end of the process. gloo's waits for its thread when it
# is deleted, and that thread may wait for the interpreter's lock: the process would never end.
KEPT: list = []

# Warnings of libraries that call each other; a user can do nothing about them.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
# DeepSpeed knows no optimizers but its own; ours are tested under it.
logging.getLogger("DeepSpeed").addFilter(
    lambda record: "untested optimizer" not in record.getMessage()
)


@dataclass
class Engine:
    """Who trains. Several models have an engine each, with one process group."""

    accelerator: Accelerator
    name: str  # for people, e.g. "DeepSpeed ZeRO-2"
    deepspeed: dict | None  # its configuration, every "auto" filled; None without DeepSpeed
    plugin: str | None = None  # the key of this configuration in Accelerate's state
    # A group on the CPU: asking there neither waits for the GPU nor disturbs it.
    cpu_group: ProcessGroup | None = None  # None with a single process

    @property
    def divides_model(self) -> bool:
        """True if no process has all weights: every forward pass needs all processes."""
        return self.kind.stage == 3

    @property
    def kind(self) -> Kind:
        return kind_of(self.deepspeed)

    @property
    def processes(self) -> int:
        return self.accelerator.num_processes

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    def set_accumulation(self, steps: int) -> None:
        """Change the micro-batches per step; only before `prepare`."""
        self.accelerator.gradient_accumulation_steps = steps
        if self.deepspeed is not None:
            micro_batch = self.deepspeed["train_micro_batch_size_per_gpu"]
            self.deepspeed["gradient_accumulation_steps"] = steps
            self.deepspeed["train_batch_size"] = micro_batch * steps * self.processes

    def fit_to(self, dim: int, n_parameters: int) -> None:
        """Fill what the configuration leaves to the model's width, and make buckets no larger than
        all gradients; only before `prepare`."""
        if self.deepspeed is not None:
            fill_by_width(self.deepspeed, dim)
            zero = self.deepspeed["zero_optimization"]
            zero["reduce_bucket_size"] = min(self.kind.reduce_bucket, n_parameters)

    def largest(self, value: int) -> int:
        """Return the largest of all processes' values. All must call this."""
        return self._exchange(value, ReduceOp.MAX)

    def total(self, value: int) -> int:
        """Return the sum of all processes' values. All must call this."""
        return self._exchange(value, ReduceOp.SUM)

    def _exchange(self, value: int, operation) -> int:
        if self.cpu_group is None:
            return value
        everyone = torch.tensor([value])
        torch.distributed.all_reduce(everyone, operation, self.cpu_group)
        return int(everyone)


def build_engine(args: TrainingArguments) -> Engine:
    """Return the engine of this launch.

    Raises UsageError: launcher, configuration file, flags and machine do not go together.
    """
    return build_engines([args])[0]


def build_engines(models: Sequence[TrainingArguments]) -> list[Engine]:
    """Return an engine for each of several models on the same processes.

    Each has a DeepSpeed configuration of its own; precision and accumulation are the same for all.

    Raises UsageError: as `build_engine`, or DeepSpeed is there for some alone.
    """
    take_launch(*models)
    name_interface()
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    require_usable_gpu()
    args, has_gpu = models[0], torch.cuda.is_available()
    check_precision(args, has_gpu)
    _check_launch(args, deepspeed)
    if has_gpu:
        torch.backends.cuda.matmul.allow_tf32 = args.tf32
    else:
        keep_freed_memory()
    plugins = {}
    # Rank 0 alone reads a checkpoint for its checksums, and the others wait for it.
    process_group = InitProcessGroupKwargs(timeout=timedelta(hours=1))
    if deepspeed:
        plugins = {str(i): plugin for i, plugin in enumerate(deepspeed_plugins(models))}
        if not has_gpu:
            # Without a backend named, every rank would take itself for rank 0 of 1.
            process_group.backend = "gloo"
            skip_compiled_communication()
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    # DDP's gradients are parts of its buckets, and not copied into them.
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)

    def accelerator(deepspeed_plugin=None) -> Accelerator:
        return Accelerator(
            deepspeed_plugin=deepspeed_plugin,
            mixed_precision=args.mixed_precision,
            gradient_accumulation_steps=args.accumulation_steps,
            kwargs_handlers=[process_group, ddp],
            cpu=not has_gpu and not deepspeed,
            step_scheduler_with_optimizer=False,
        )

    try:  # the first one takes all plugins, and the others find them
        accelerators = [accelerator(plugins or None), *(accelerator() for _ in models[1:])]
    except (torch.distributed.DistNetworkError, torch.distributed.DistStoreError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UsageError(
            f"the processes cannot meet at {address}: {str(error).splitlines()[0]}"
        ) from error
    if accelerators[0].num_processes != world_size:
        raise UsageError(
            f"the launcher started {world_size} processes, "
            f"Accelerate sees {accelerators[0].num_processes}"
        )
    use_all_cores()
    group = torch.distributed.new_group(backend="gloo") if world_size > 1 else None
    KEPT.append(group)
    engines = []
    for i, each in enumerate(accelerators):
        key = str(i) if plugins else None
        config = plugins[key].deepspeed_config if plugins else None
        engines.append(Engine(each, _name(config, world_size), config, key, group))
    return engines


def _name(deepspeed: dict | None, processes: int) -> str:
    if deepspeed is not None:
        return f"DeepSpeed {kind_of(deepspeed).name}"
    if processes > 1:
        return "DDP, not DeepSpeed"
    return "single process, no engine"


def check_precision(args: TrainingArguments, has_gpu: bool) -> None:
    """Raise UsageError if this machine does not compute in --dtype, or not by --tf32."""
    if args.dtype == "float16" and not has_gpu:
        raise UsageError("--dtype float16 needs a GPU; on a CPU use bfloat16 or float32")
    if args.dtype == "bfloat16" and has_gpu and not has_bf16():
        raise UsageError(f"{torch.cuda.get_device_name()} has no bfloat16: pass --dtype float16")
    if args.tf32 and args.dtype != "float32":
        raise UsageError(f"--tf32 is a way to compute in --dtype float32, not in {args.dtype}")
    if args.tf32 and not (has_gpu and has_tf32()):
        raise UsageError("--tf32 needs an NVIDIA GPU of the Ampere generation or newer")


def _check_launch(args: TrainingArguments, deepspeed: bool) -> None:
    """Raise UsageError if the launcher said something that Accelerate would ignore here."""
    environ = os.environ
    wants_cpu = environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
    launched = environ.get("ACCELERATE_MIXED_PRECISION", "no")  # "no" is also what silence sets
    if launched not in ("no", args.mixed_precision):
        raise UsageError(
            f"the launcher says --mixed_precision {launched}, but --dtype is {args.dtype}"
        )
    steps = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    if steps not in ("auto", str(args.accumulation_steps)):
        raise UsageError(
            f"the launcher says --gradient_accumulation_steps {steps}, but --accumulation_steps is "
            f"{args.accumulation_steps}"
        )
    if deepspeed and wants_cpu:
        raise UsageError(
            "ACCELERATE_USE_CPU or --cpu switches DeepSpeed off without a word: leave it out"
        )
    if deepspeed and "RANK" not in environ:
        raise UsageError(
            "DeepSpeed is asked for without a launcher: use accelerate launch, or --deepspeed"
        )
    if "MASTER_PORT" in environ and "RANK" not in environ and wants_cpu:
        raise UsageError(
            "accelerate launch --cpu starts a single process, whatever --num_processes says: "
            "leave --cpu out and pass --multi_gpu (DDP, on CPUs too) or --use_deepspeed"
        )
    gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and int(environ.get("LOCAL_WORLD_SIZE", 1)) > gpus:
        raise UsageError(
            f"{environ['LOCAL_WORLD_SIZE']} processes for {gpus} GPUs: pass --num_processes {gpus} "
            "to accelerate launch"
        )


def deepspeed_plugin(args: TrainingArguments) -> DeepSpeedPlugin:
    """Return Accelerate's plugin for the DeepSpeed file in use, every "auto" filled.

    Raises UsageError: the file contradicts the flags, or Accelerate rejects it.
    """
    return deepspeed_plugins([args])[0]


def deepspeed_plugins(models: Sequence[TrainingArguments]) -> list[DeepSpeedPlugin]:
    """Return the `deepspeed_plugin` of each of several models."""
    files = [file_of(args) for args in models]
    configs = [_configuration(args, file) for args, file in zip(models, files, strict=True)]
    # The launcher's values must not fill or override what is now explicit.
    for name in ("GRADIENT_ACCUMULATION_STEPS", "GRADIENT_CLIPPING", "MIXED_PRECISION"):
        os.environ.pop(f"ACCELERATE_{name}", None)
    plugins = []
    for args, file, config in zip(models, files, configs, strict=True):
        with _rejected_by_accelerate(file):
            steps = args.accumulation_steps
            plugins.append(DeepSpeedPlugin(config, gradient_accumulation_steps=steps))
    return plugins


def _configuration(args: TrainingArguments, file: str) -> dict:
    """Return the configuration of a file; "none" takes the launcher's flags, as --zero_stage."""
    with _rejected_by_accelerate(file):
        if file == "none":
            config, source = DeepSpeedPlugin().deepspeed_config, "accelerate launch"
        else:
            config, source = read_config(file), file
        config = resolve(config, args, int(os.environ.get("WORLD_SIZE", 1)), source)
    # Accelerate would drop these flags of its launcher where the file says otherwise.
    in_file = {
        "GRADIENT_CLIPPING": config["gradient_clipping"],
        "DEEPSPEED_ZERO_STAGE": config["zero_optimization"]["stage"],
        "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": offload_device(config, "optimizer"),
        "DEEPSPEED_OFFLOAD_PARAM_DEVICE": offload_device(config, "param"),
    }
    for name, value in in_file.items():
        launched = os.environ.get(f"ACCELERATE_{name}", "auto")
        same = launched in ("auto", "none", str(value))
        if not same and not (launched.replace(".", "").isdigit() and float(launched) == value):
            flag = name.removeprefix("DEEPSPEED_").lower()
            raise UsageError(
                f"the launcher says --{flag} {launched}, but {source} and flags {value}"
            )
    return config


@contextmanager
def _rejected_by_accelerate(file: str) -> Iterator[None]:
    """Raise UsageError where Accelerate does not take what it is given in here."""
    try:
        yield
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, UsageError):
            raise
        reason = " ".join(str(error).split())
        raise UsageError(
            f"Accelerate rejects the DeepSpeed configuration {file}: {reason}"
        ) from error


def plain_module(model: nn.Module) -> nn.Module:
    """Return the module inside DDP's or DeepSpeed's wrapper. (Accelerate's `unwrap_model` imports
    DeepSpeed to find out, which takes a second.)"""
    return getattr(model, "module", model)


def skip_compiled_communication() -> None:
    """Keep DeepSpeed from compiling, at start, an operation that only its inference calls."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
