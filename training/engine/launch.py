"""Who does the training: DeepSpeed, DistributedDataParallel or a single process, as the launcher
said.

Accelerate decides by environment variables that its launcher sets. What it does without a word,
this module says or refuses: a precision that would be ignored, a number of processes that would not
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
from training.engine.environment import name_interface, take_launch
from training.engine.gpu import has_bf16, has_tf32, require_usable_gpus
from training.engine.kinds import Kind, kind_of

# Process groups, and what holds one, to the end of the process: gloo's waits for its thread when it
# is deleted, and that thread may wait for the interpreter's lock, to let go of a tensor. (Seen: a
# rank that had finished never left.)
KEPT: list = []


@dataclass
class Engine:
    """Who trains. Ask it, and not Accelerate's state, for what DeepSpeed was told: with several
    models that is another configuration each."""

    accelerator: Accelerator
    name: str  # for people, e.g. "DeepSpeed ZeRO-2"
    deepspeed: dict | None  # its configuration, every "auto" filled; None without DeepSpeed
    plugin: str | None = None  # the key of this configuration in Accelerate's state
    # Processes' group on the CPU: asking there neither waits for the GPU nor disturbs it.
    cpu_group: ProcessGroup | None = None  # None with a single process

    @property
    def zero_stage(self) -> int | None:
        return None if self.deepspeed is None else self.deepspeed["zero_optimization"]["stage"]

    @property
    def divides_model(self) -> bool:
        """Whether no process has all weights: every forward pass needs all processes."""
        return self.zero_stage == 3

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
        all gradients, for what is never used is memory too; only before `prepare`."""
        if self.deepspeed is not None:
            fill_by_width(self.deepspeed, dim)
            zero = self.deepspeed["zero_optimization"]
            asked = int(zero.get("reduce_bucket_size", 500_000_000))  # DeepSpeed's own default
            zero["reduce_bucket_size"] = min(asked, n_parameters)

    def largest(self, value: int) -> int:
        """Of all processes' values. All must call this."""
        return self._exchange(value, ReduceOp.MAX)

    def total(self, value: int) -> int:
        """The sum of all processes' values. All must call this."""
        return self._exchange(value, ReduceOp.SUM)

    def _exchange(self, value: int, operation) -> int:
        if self.cpu_group is None:
            return value
        everyone = torch.tensor([value])
        torch.distributed.all_reduce(everyone, operation, self.cpu_group)
        return int(everyone)


# Of libraries calling each other; nothing that a user could do anything about.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
# DeepSpeed knows no optimizers but its own; ours are tested under it.
logging.getLogger("DeepSpeed").addFilter(
    lambda record: "untested optimizer" not in record.getMessage()
)


def build_engine(args: TrainingArguments) -> Engine:
    """The Accelerator for this launch. Raises UsageError: launcher, configuration file, flags and
    machine do not go together."""
    return build_engines([args])[0]


def build_engines(models: Sequence[TrainingArguments]) -> list[Engine]:
    """One for each of several models on the same processes, with a DeepSpeed configuration of its
    own. What is said of precision and accumulation is the same for all. Raises UsageError: as
    `build_engine`, or DeepSpeed is there for some alone."""
    take_launch(*models)
    name_interface()
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    require_usable_gpus()
    has_gpu = torch.cuda.is_available()
    args = models[0]
    _check_launch(args, deepspeed, has_gpu)
    if has_gpu:
        torch.backends.cuda.matmul.allow_tf32 = args.tf32
    else:
        keep_freed_memory()
    # Rank 0 alone reads a checkpoint for its checksums, and the others wait for it.
    plugins = {}
    process_group = InitProcessGroupKwargs(timeout=timedelta(hours=1))
    if deepspeed:
        plugins = {str(i): plugin for i, plugin in enumerate(deepspeed_plugins(models))}
        if "RANK" not in os.environ:
            raise UsageError(
                "DeepSpeed is asked for without a launcher: use accelerate launch, or --deepspeed"
            )
        if not has_gpu:
            # Without a backend named, every rank would take itself for rank 0 of 1.
            process_group.backend = "gloo"
            skip_compiled_communication()
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    how = {
        "mixed_precision": args.mixed_precision,
        "gradient_accumulation_steps": args.accumulation_steps,
        # DDP's gradients are parts of its buckets, and not copied into them.
        "kwargs_handlers": [
            process_group,
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ],
        "cpu": not has_gpu and not deepspeed,
        "step_scheduler_with_optimizer": False,
    }
    try:  # the first one takes all plugins, and the others find them
        accelerators = [Accelerator(deepspeed_plugin=plugins or None, **how)]
        accelerators += [Accelerator(**how) for _ in models[1:]]
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
    for i, accelerator in enumerate(accelerators):
        key = str(i) if plugins else None
        config = plugins[key].deepspeed_config if plugins else None
        engines.append(Engine(accelerator, _name(config, world_size), config, key, group))
    return engines


def _name(deepspeed: dict | None, processes: int) -> str:
    if deepspeed is not None:
        return f"DeepSpeed {kind_of(deepspeed).name}"
    if processes > 1:
        return "DDP, not DeepSpeed"
    return "single process, no engine"


def _check_launch(args: TrainingArguments, deepspeed: bool, has_gpu: bool) -> None:
    environ = os.environ
    wants_cpu = environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
    launched = environ.get(
        "ACCELERATE_MIXED_PRECISION", "no"
    )  # "no" is also what a silent launcher sets
    if launched not in ("no", args.mixed_precision):
        raise UsageError(
            f"the launcher says --mixed_precision {launched}, but --dtype is {args.dtype}"
        )
    check_precision(args, has_gpu)
    if deepspeed and wants_cpu:
        raise UsageError(
            "ACCELERATE_USE_CPU or --cpu switches DeepSpeed off without a word: leave it out"
        )
    if "MASTER_PORT" in environ and "RANK" not in environ and wants_cpu:
        raise UsageError(
            "accelerate launch --cpu starts a single process, whatever --num_processes says: "
            "leave --cpu out and pass --multi_gpu (DDP, on CPUs too) or --use_deepspeed"
        )
    steps = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    if steps not in ("auto", str(args.accumulation_steps)):
        raise UsageError(
            f"the launcher says --gradient_accumulation_steps {steps}, but --accumulation_steps is "
            f"{args.accumulation_steps}"
        )
    if has_gpu and int(environ.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count():
        raise UsageError(
            f"{environ['LOCAL_WORLD_SIZE']} processes for {torch.cuda.device_count()} GPUs: "
            f"pass --num_processes {torch.cuda.device_count()} to accelerate launch"
        )


def check_precision(args: TrainingArguments, has_gpu: bool) -> None:
    """Raises UsageError: this machine does not compute in --dtype, or not by --tf32."""
    if args.dtype == "float16" and not has_gpu:
        raise UsageError("--dtype float16 needs a GPU; on a CPU use bfloat16 or float32")
    if args.dtype == "bfloat16" and has_gpu and not has_bf16():
        raise UsageError(f"{torch.cuda.get_device_name()} has no bfloat16: pass --dtype float16")
    if args.tf32 and args.dtype != "float32":
        raise UsageError(f"--tf32 is a way to compute in --dtype float32, not in {args.dtype}")
    if args.tf32 and not (has_gpu and has_tf32()):
        raise UsageError("--tf32 needs an NVIDIA GPU of the Ampere generation or newer")


def deepspeed_plugin(args: TrainingArguments) -> DeepSpeedPlugin:
    """The plugin for the configuration that the launcher named, every "auto" filled from the flags.

    Raises UsageError: the configuration contradicts the flags, or Accelerate rejects it.
    """
    return deepspeed_plugins([args])[0]


def deepspeed_plugins(models: Sequence[TrainingArguments]) -> list[DeepSpeedPlugin]:
    """`deepspeed_plugin` of each of several models, which may name a file of its own."""
    files = [file_of(args) for args in models]
    configs = [_configuration(args, file) for args, file in zip(models, files, strict=True)]
    # The launcher's values must not fill or override what is now explicit.
    for name in ("GRADIENT_ACCUMULATION_STEPS", "GRADIENT_CLIPPING", "MIXED_PRECISION"):
        os.environ.pop(f"ACCELERATE_{name}", None)
    plugins = []
    for args, file, config in zip(models, files, configs, strict=True):
        with _rejected_by_accelerate(file):
            how = {"gradient_accumulation_steps": args.accumulation_steps}
            plugins.append(DeepSpeedPlugin(hf_ds_config=config, **how))
    return plugins


def _configuration(args: TrainingArguments, file: str) -> dict:
    """Of a file; "none" takes the launcher's own flags, such as --zero_stage."""
    with _rejected_by_accelerate(file):
        if file == "none":
            config, source = DeepSpeedPlugin().deepspeed_config, "accelerate launch"
        else:
            config, source = read_config(file), file
        config = resolve(config, args, int(os.environ.get("WORLD_SIZE", 1)), source)
        _check_launcher_agrees(config, source)
        return config


@contextmanager
def _rejected_by_accelerate(file: str) -> Iterator[None]:
    """Raises UsageError: Accelerate does not take what it is given in here."""
    try:
        yield
    except UsageError:
        raise
    except (ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"Accelerate rejects the DeepSpeed configuration {file}: {reason}"
        ) from error


def _check_launcher_agrees(config: dict, source: str) -> None:
    """Accelerate would drop these flags of its launcher where the file says otherwise."""
    zero = config["zero_optimization"]
    in_file = {
        "GRADIENT_CLIPPING": config["gradient_clipping"],
        "DEEPSPEED_ZERO_STAGE": zero["stage"],
        "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": offload_device(config, "optimizer") or "none",
        "DEEPSPEED_OFFLOAD_PARAM_DEVICE": offload_device(config, "param") or "none",
    }
    for name, value in in_file.items():
        launched = os.environ.get(f"ACCELERATE_{name}", "auto")
        same = launched == str(value) or (
            isinstance(value, int | float) and launched != "auto" and float(launched) == value
        )
        if launched not in ("auto", "none") and not same:
            flag = name.removeprefix("DEEPSPEED_").lower()
            raise UsageError(
                f"the launcher says --{flag} {launched}, but {source} and flags {value}"
            )


def plain_module(model: nn.Module) -> nn.Module:
    """The module inside DDP's or DeepSpeed's wrapper. (Accelerate's `unwrap_model` imports
    DeepSpeed to find out, which takes a second.)"""
    return getattr(model, "module", model)


def skip_compiled_communication() -> None:
    """At start DeepSpeed would compile a communication operation that only its inference calls."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
