"""Who does the training: DeepSpeed, DistributedDataParallel or a single process, as launched.

Accelerate decides by environment variables that its launcher sets. What it would do without a word
is refused here: a precision that is ignored, a process that is missing, DeepSpeed switched off.
"""

import logging
import os
import socket
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedDataParallelKwargs, InitProcessGroupKwargs
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
from training.engine.kinds import Kind, kind_of

# Process groups, and what holds one, to the end of the process. gloo's waits for its thread when it
# is deleted, and that thread may wait for the interpreter's lock: the process would never end.
KEPT: list = []
# The environment of one process that has nobody to meet: port 0 is any that is free.
ALONE = {
    **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
}
INTERFACE = "GLOO_SOCKET_IFNAME"

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
    def kind(self) -> Kind:
        return kind_of(self.deepspeed)

    @property
    def divides_model(self) -> bool:
        """True if no process has all weights: every forward pass needs all processes."""
        return self.kind.stage == 3

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
        everyone = torch.tensor([value])
        if self.cpu_group is not None:
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
        plugins = {str(i): deepspeed_plugin(args) for i, args in enumerate(models)}
        # The plugins have the launcher's value, which may be "auto": Accelerate wants a number.
        os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)
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
        reason = str(error).splitlines()[0]
        raise UsageError(f"the processes cannot meet at {address}: {reason}") from error
    if (seen := accelerators[0].num_processes) != world_size:
        raise UsageError(f"the launcher started {world_size} processes, Accelerate sees {seen}")
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
    return "DDP, not DeepSpeed" if processes > 1 else "single process, no engine"


def take_launch(*models: TrainingArguments) -> None:
    """Make the environment that of `accelerate launch`, after `deepspeed`, `torchrun` or none.

    Where several models are trained, each may name a DeepSpeed file; the launcher's is for the
    others.

    Raises UsageError: --deepspeed contradicts the launcher, or some models have no file.
    """
    if "LOCAL_SIZE" in os.environ:  # as DeepSpeed's launcher calls it
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["LOCAL_SIZE"])
    with_file = [args.run_name for args in models if args.deepspeed]
    if not with_file:
        return
    if len(models) == 1:
        name_configuration(models[0])
    elif len(with_file) < len(models) and os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        raise UsageError(
            f"DeepSpeed trains all models or none: only {', '.join(with_file)} and not the "
            'launcher name a file: add "deepspeed": "ds_config.json" to the others'
        )
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    if "RANK" not in os.environ:
        os.environ.update(ALONE)


def name_configuration(args: TrainingArguments) -> None:
    """Set the launcher's DeepSpeed file to --deepspeed. Raises UsageError: it names another."""
    if args.deepspeed is None:
        return
    named = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if named != "none" and Path(named).resolve() != Path(args.deepspeed).resolve():
        raise UsageError(
            f"--deepspeed is {args.deepspeed}, but the launcher's DeepSpeed file is {named}: "
            "name one of them"
        )
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = args.deepspeed


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
    environ, gpus = os.environ, torch.cuda.device_count() if torch.cuda.is_available() else None
    in_use = {
        "MIXED_PRECISION": args.mixed_precision,
        "GRADIENT_ACCUMULATION_STEPS": args.accumulation_steps,
    }
    _check_flags(in_use, "--dtype and --accumulation_steps")
    wants_cpu = environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
    processes = int(environ.get("LOCAL_WORLD_SIZE", 1))
    problem = None
    if deepspeed and wants_cpu:
        problem = "ACCELERATE_USE_CPU or --cpu switches DeepSpeed off: leave it out"
    elif deepspeed and "RANK" not in environ:
        problem = "DeepSpeed without a launcher: use accelerate launch, or --deepspeed"
    elif "MASTER_PORT" in environ and "RANK" not in environ and wants_cpu:
        problem = "accelerate launch --cpu starts one process: pass --multi_gpu (DDP, on CPUs too)"
    elif gpus is not None and processes > gpus:
        problem = f"{processes} processes for {gpus} GPUs: pass --num_processes {gpus}"
    if problem:
        raise UsageError(problem)


def _check_flags(in_use: dict, source: str) -> None:
    """Raise UsageError for a flag of Accelerate's launcher that contradicts what is in use:
    Accelerate would ignore it.

    Args:
        in_use: values by the launcher's variables; without a flag these are "auto", "none" or "no".
        source: where the values come from.
    """
    for name, value in in_use.items():
        launched = os.environ.get(f"ACCELERATE_{name}", "auto")
        same = launched in ("auto", "none", "no", str(value))
        if not same and not (launched.replace(".", "").isdigit() and float(launched) == value):
            flag = name.removeprefix("DEEPSPEED_").lower()
            raise UsageError(f"the launcher says --{flag} {launched}, but {source} give {value}")


def deepspeed_plugin(args: TrainingArguments) -> DeepSpeedPlugin:
    """Return Accelerate's plugin for the DeepSpeed file in use, every "auto" filled.

    Raises UsageError: file, flags and launcher contradict each other, or Accelerate rejects it.
    """
    file = file_of(args)
    source = "accelerate launch" if file == "none" else file
    try:
        config = resolve(read_config(file), args, int(os.environ.get("WORLD_SIZE", 1)), source)
        in_use = {
            "GRADIENT_CLIPPING": config["gradient_clipping"],
            "DEEPSPEED_ZERO_STAGE": config["zero_optimization"]["stage"],
            "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": offload_device(config, "optimizer"),
            "DEEPSPEED_OFFLOAD_PARAM_DEVICE": offload_device(config, "param"),
        }
        _check_flags(in_use, f"{source} and flags")
        return DeepSpeedPlugin(
            config,
            gradient_accumulation_steps=args.accumulation_steps,
            gradient_clipping=config["gradient_clipping"],
        )
    except UsageError:
        raise
    except (ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"Accelerate rejects the DeepSpeed configuration {source}: {reason}"
        ) from error


def plain_module(model: nn.Module) -> nn.Module:
    """Return the module inside DDP's or DeepSpeed's wrapper. (Accelerate's `unwrap_model` imports
    DeepSpeed to find out, which takes a second.)"""
    return getattr(model, "module", model)


def skip_compiled_communication() -> None:
    """Keep DeepSpeed from compiling, at start, an operation that only its inference calls."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def name_interface() -> None:
    """On several machines, name the network interface to gloo where it would take the loopback one.

    Gloo listens at the address of the machine's own name, which Debian and Ubuntu give as
    127.0.1.1: other machines would then look for this one on themselves.
    """
    processes = os.environ.get("WORLD_SIZE", "1")
    if os.environ.get("LOCAL_WORLD_SIZE", processes) == processes or INTERFACE in os.environ:
        return
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if not socket.gethostbyname(socket.gethostname()).startswith("127."):
            return
        probe.connect((os.environ["MASTER_ADDR"], 9))  # looks for a route and sends nothing
        here = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if here in {each.address for each in addresses}:
                os.environ[INTERFACE] = name
