"""Who trains, as launched; what Accelerate would silently ignore is refused."""

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
from training.engine.deepspeed_config import (
    file_of,
    fill_by_width,
    offload_device,
    read_config,
    resolve,
)
from training.engine.device import has_bf16, keep_freed_memory, require_usable_gpu, use_all_cores
from training.engine.estimate import Kind, kind_of

# What holds a process group. gloo's waits for its thread when it is deleted, and the
# thread may wait for the interpreter's lock: the process would never end.
KEPT: list = []
# The environment of one process that has nobody to meet: port 0 is any that is free.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

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
    deepspeed: dict | None  # its configuration, filled; None without DeepSpeed
    plugin: str | None = None  # the key of this configuration in Accelerate's state
    # A group on the CPU: asking there neither waits for the GPU nor disturbs it.
    cpu_group: ProcessGroup | None = None  # None with a single process

    @property
    def kind(self) -> Kind:
        return kind_of(self.deepspeed)

    @property
    def divides_model(self) -> bool:
        """True under ZeRO-3: every forward pass needs all processes."""
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
        """Fill in the width, and limit buckets; only before `prepare`."""
        if self.deepspeed is not None:
            fill_by_width(self.deepspeed, dim)
            zero = self.deepspeed["zero_optimization"]
            zero["reduce_bucket_size"] = min(self.kind.reduce_bucket, n_parameters)

    def largest(self, value: int) -> int:
        """Return the largest of all processes' values. All must call this."""
        return self.total(value, ReduceOp.MAX)

    def total(self, value: int, operation=ReduceOp.SUM) -> int:
        """Return the sum of all processes' values. All must call this."""
        everyone = torch.tensor([value])
        if self.cpu_group is not None:
            torch.distributed.all_reduce(everyone, operation, self.cpu_group)
        return int(everyone)


def build_engines(models: Sequence[TrainingArguments]) -> list[Engine]:
    """Return an engine for each of several models on the same processes.

    Precision and accumulation are the same for all. Raises UsageError: launcher,
    configuration file, flags and machine do not go together.
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
        # It may be "auto", but Accelerate wants a number.
        os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)
        if not has_gpu:
            # Without a backend named, every rank would take itself for rank 0 of 1.
            process_group.backend = "gloo"
            skip_compiled_communication()
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    # DDP's gradients are not copied into its buckets.
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    try:
        accelerators = [
            Accelerator(
                deepspeed_plugin=plugin,  # the first takes all
                mixed_precision=args.mixed_precision,
                gradient_accumulation_steps=args.accumulation_steps,
                kwargs_handlers=[process_group, ddp],
                cpu=not has_gpu and not deepspeed,
                step_scheduler_with_optimizer=False,
            )
            for plugin in [plugins or None] + [None] * (len(models) - 1)
        ]
    except (torch.distributed.DistNetworkError, torch.distributed.DistStoreError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).splitlines()[0]
        raise UsageError(f"the processes cannot meet at {address}: {reason}") from error
    if (seen := accelerators[0].num_processes) != world_size:
        raise UsageError(f"the launcher started {world_size} processes, Accelerate sees {seen}")
    use_all_cores()
    group = torch.distributed.new_group(backend="gloo") if world_size > 1 else None
    KEPT.append(group)
    name = "DDP, not DeepSpeed" if world_size > 1 else "single process, no engine"
    if not deepspeed:
        return [Engine(each, name, None, None, group) for each in accelerators]
    engines = []
    for each, (key, plugin) in zip(accelerators, plugins.items(), strict=True):
        config = plugin.deepspeed_config
        engines.append(Engine(each, f"DeepSpeed {kind_of(config).name}", config, key, group))
    return engines


def take_launch(*models: TrainingArguments) -> None:
    """Make the environment of any launcher, or none, that of `accelerate launch`.

    Of several models each may name a DeepSpeed file; the launcher's is for the others.
    Raises UsageError: --deepspeed contradicts the launcher, or a model has no file.
    """
    if "LOCAL_SIZE" in os.environ:  # as DeepSpeed's launcher calls it
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["LOCAL_SIZE"])
    files = [args.deepspeed for args in models]
    if not any(files):
        return
    if len(files) == 1:
        named = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        if named != "none" and Path(named).resolve() != Path(files[0]).resolve():
            raise UsageError(
                f"--deepspeed is {files[0]}, but the launcher's DeepSpeed file is {named}: name one"
            )
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = files[0]
    elif not all(files) and os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        raise UsageError(
            "DeepSpeed trains all models or none, and some name no file: add "
            '"deepspeed": "ds_config.json" to them'
        )
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    if "RANK" not in os.environ:
        os.environ.update(ALONE)


def check_precision(args: TrainingArguments, has_gpu: bool) -> None:
    """Raise UsageError if this machine does not compute in --dtype or --tf32."""
    if args.dtype == "float16" and not has_gpu:
        raise UsageError("--dtype float16 needs a GPU; on a CPU use bfloat16 or float32")
    if args.dtype == "bfloat16" and has_gpu and not has_bf16():
        raise UsageError(f"{torch.cuda.get_device_name()} has no bfloat16: pass --dtype float16")
    nvidia = has_gpu and torch.version.cuda is not None
    if args.tf32 and not (nvidia and torch.cuda.get_device_capability() >= (8, 0)):
        raise UsageError("--tf32 needs an NVIDIA GPU of the Ampere generation or newer")


def _check_launch(args: TrainingArguments, deepspeed: bool) -> None:
    """Raise UsageError if Accelerate would ignore what the launcher said."""
    in_use = {
        "MIXED_PRECISION": args.mixed_precision,
        "GRADIENT_ACCUMULATION_STEPS": args.accumulation_steps,
    }
    _check_flags(in_use, "--dtype and --accumulation_steps give")
    wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if deepspeed and wants_cpu:
        raise UsageError("ACCELERATE_USE_CPU or --cpu switches DeepSpeed off: leave it out")
    if deepspeed and "RANK" not in os.environ:
        raise UsageError("DeepSpeed without a launcher: use accelerate launch, or --deepspeed")
    if torch.cuda.is_available() and processes > (gpus := torch.cuda.device_count()):
        raise UsageError(f"{processes} processes for {gpus} GPUs: pass --num_processes {gpus}")


def _check_flags(in_use: dict, source: str) -> None:
    """Raise UsageError for a flag of Accelerate's launcher that it would ignore."""
    for name, value in in_use.items():
        launched = os.environ.get(f"ACCELERATE_{name}", "auto")
        if launched not in ("auto", "none", "no", str(value), f"{value}.0"):
            flag = name.removeprefix("DEEPSPEED_").lower()
            raise UsageError(f"the launcher says --{flag} {launched}, but {source} {value}")


def deepspeed_plugin(args: TrainingArguments) -> DeepSpeedPlugin:
    """Return Accelerate's plugin for the DeepSpeed file in use, filled by the flags.
    Raises UsageError: they contradict each other, or Accelerate rejects the file."""
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
        _check_flags(in_use, f"{source} says")
        return DeepSpeedPlugin(
            config,
            gradient_accumulation_steps=args.accumulation_steps,
            gradient_clipping=config["gradient_clipping"],
        )
    except UsageError:
        raise
    except (ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"Accelerate rejects {source}: {reason}") from error


def plain_module(model: nn.Module) -> nn.Module:
    """Return the module in a wrapper. (`unwrap_model` imports DeepSpeed.)"""
    return getattr(model, "module", model)


def skip_compiled_communication() -> None:
    """Keep DeepSpeed from compiling an operation that its inference alone calls."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def name_interface() -> None:
    """Have gloo listen at the network interface that reaches the first machine.

    By itself it takes the address of the host name: on Debian and Ubuntu 127.0.1.1.
    """
    total, name = os.environ.get("WORLD_SIZE", "1"), "GLOO_SOCKET_IFNAME"
    if os.environ.get("LOCAL_WORLD_SIZE", total) == total or name in os.environ:
        return
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing
        here = probe.getsockname()[0]
        for interface, addresses in psutil.net_if_addrs().items():
            if here in {each.address for each in addresses}:
                os.environ[name] = interface
