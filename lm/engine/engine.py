"""Start the engine that launcher and flags choose; refuse settings that Accelerate would ignore.

`args` are the training flags in this room: TrainingArguments of lm/training/arguments.py.
"""

import logging
import os
import socket
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch.distributed import ProcessGroup, ReduceOp

from lm.common.errors import UsageError
from lm.engine.deepspeed_config import BY_WIDTH, file_of, read_config, resolve
from lm.engine.hardware import (
    has_bf16,
    keep_freed_memory,
    processes_here,
    require_usable_gpu,
    set_threads,
)
from lm.engine.strategy import Strategy, strategy_of

# Objects with a process group. They must never be deleted: deleting a group of gloo waits for the
# group's thread. If that thread waits for the interpreter's lock, the process hangs.
KEPT: list = []
CHECKPOINT_WRITER = "checkpoint writer"  # name of a thread; `exit_rank` waits for it
OTHER_ENGINES = ("FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")  # of `accelerate launch`
TIMEOUT = timedelta(hours=1)  # of an exchange: rank 0 may be verifying a checkpoint
FIRST_WAIT = 60  # seconds after which a line says that other processes are missing
# DeepSpeed and Accelerate call deprecated functions of PyTorch. Users cannot change that.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
# DeepSpeed warns about "untested" optimizers. Our tests run our optimizers under DeepSpeed.
logging.getLogger("DeepSpeed").addFilter(lambda record: "untested" not in record.getMessage())


@dataclass
class Engine:
    """The processes that train a model. If several models train, each has an engine."""

    accelerator: Accelerator
    name: str  # for the summary at the start, e.g. "DeepSpeed ZeRO-2"
    deepspeed: dict | None  # the configuration that DeepSpeed gets; None without DeepSpeed
    plugin: str | None = None  # key of the DeepSpeed configuration in Accelerate's state
    cpu_group: ProcessGroup | None = None  # a group of gloo; None if there is one process
    coalesces: bool = False  # ZeRO-2 reduces gradients once per step, not in every micro-batch

    @property
    def strategy(self) -> Strategy:
        return replace(strategy_of(self.deepspeed), coalesces=self.coalesces)

    @property
    def divides_model(self) -> bool:
        """True under ZeRO-3. Then every forward pass needs all processes."""
        return self.strategy.stage == 3

    @property
    def processes(self) -> int:
        return self.accelerator.num_processes

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    def set_accumulation(self, steps: int) -> None:
        """Change the number of micro-batches per step. Call this before `accelerator.prepare`."""
        self.accelerator.gradient_accumulation_steps = steps
        if self.deepspeed is not None:
            micro_batch = self.deepspeed["train_micro_batch_size_per_gpu"]
            self.deepspeed["gradient_accumulation_steps"] = steps
            self.deepspeed["train_batch_size"] = micro_batch * steps * self.processes

    def fit_to(self, dim: int, n_parameters: int) -> None:
        """Set sizes in `deepspeed` by the model. Call this before `accelerator.prepare`."""
        if self.deepspeed is not None:
            zero = self.deepspeed["zero_optimization"]
            if zero.get(BY_WIDTH) == "auto":  # norms and small matrices stay whole on every process
                zero[BY_WIDTH] = 10 * dim
            zero["reduce_bucket_size"] = min(self.strategy.reduce_bucket, n_parameters)

    def largest(self, value: int) -> int:
        """Return the largest value of all processes. Every process must call this."""
        return self.total(value, ReduceOp.MAX)

    def total(self, value: int, operation=ReduceOp.SUM) -> int:
        """Return the sum of the values of all processes. Every process must call this."""
        result = torch.tensor([value])
        if self.cpu_group is not None:
            torch.distributed.all_reduce(result, operation, self.cpu_group)
        return int(result)


def build_engines(models: Sequence) -> list[Engine]:
    """Return one engine for each model. All models have the same precision and accumulation. Raises
    UsageError if launcher, DeepSpeed file, flags or machine conflict, or processes cannot meet."""
    set_launch_variables(*models)
    set_gloo_interface()
    require_usable_gpu()
    args, has_gpu = models[0], torch.cuda.is_available()
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    check_precision(args, has_gpu)
    _check_launch(deepspeed)
    if deepspeed and "RANK" not in os.environ:  # no launcher, a single process
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # any free port
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    if not has_gpu:
        keep_freed_memory()
    plugins = None
    if deepspeed:  # the keys are those of Accelerate's state
        plugins = {str(i): deepspeed_plugin(each, len(models)) for i, each in enumerate(models)}
        if not has_gpu:
            skip_compiled_communication()
    with announced_wait():
        accelerators = _accelerators(models, plugins)
        set_threads(args.threads)
        group = None
        if accelerators[0].num_processes > 1:
            group = torch.distributed.new_group(backend="gloo", timeout=TIMEOUT)
            KEPT.append(group)
            accelerators[0].wait_for_everyone()  # the first exchange between GPUs
    if plugins is None:
        name = "single process, no engine" if group is None else "DDP"
        return [Engine(each, name, None, None, group) for each in accelerators]
    engines = []
    for each, (key, plugin) in zip(accelerators, plugins.items(), strict=True):
        config = plugin.deepspeed_config
        engines.append(Engine(each, f"DeepSpeed {strategy_of(config).name}", config, key, group))
    return engines


def _accelerators(models: Sequence, plugins: dict | None) -> list[Accelerator]:
    """Return an Accelerator for each model; the first waits for the other processes. Raises
    UsageError if they cannot meet. `plugins` is None without DeepSpeed."""
    args, on_cpu = models[0], not torch.cuda.is_available()
    process_group = InitProcessGroupKwargs(timeout=TIMEOUT)
    if plugins and on_cpu:
        process_group.backend = "gloo"  # without gloo each process is alone: rank 0 of 1
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)  # avoids a copy of gradients
    create = partial(
        Accelerator,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.accumulation_steps,
        kwargs_handlers=[process_group, ddp],
        cpu=on_cpu and not plugins,
        step_scheduler_with_optimizer=False,  # the loop sets the learning rate
    )
    try:
        first = create(deepspeed_plugin=plugins)  # the others find the plugins in its state
    except torch.distributed.DistError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).splitlines()[0]
        raise UsageError(f"the processes cannot meet at {address}: {reason}") from error
    world_size, seen = int(os.environ.get("WORLD_SIZE", 1)), first.num_processes
    if seen != world_size:
        raise UsageError(f"the launcher started {world_size} processes, Accelerate sees {seen}")
    return [first, *(create() for _ in models[1:])]


@contextmanager
def announced_wait() -> Iterator[None]:
    """Print one line if the context lasts longer than FIRST_WAIT seconds."""
    rank, host = os.environ.get("RANK", "0"), socket.gethostname()
    text = f"rank {rank} on {host} has waited {FIRST_WAIT} s for the other processes to begin: "
    text += "see docs/troubleshooting.md"
    timer = threading.Timer(FIRST_WAIT, print, [text], {"flush": True})
    timer.daemon = True  # the process may end first
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def set_launch_variables(*models) -> None:
    """Set the environment variables that `accelerate launch` sets for a DeepSpeed file. If several
    models train, a model without --deepspeed uses the launcher's DeepSpeed file. Raises UsageError
    if --deepspeed contradicts the launcher, if only some models use DeepSpeed, or if the launcher's
    settings would compile the model or divide it with another engine."""
    if (backend := os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")).lower() != "no":
        remedy = "leave out the launcher's setting, and use --compile on"
        raise UsageError(f"dynamo_backend {backend} would compile the model as a whole: {remedy}")
    for name in OTHER_ENGINES:
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true":
            take = "use DeepSpeed or DDP: ENGINE=zero2, or another file of configs/"
            raise UsageError(f"the launcher's engine {name} is not supported: {take}")
    if "LOCAL_SIZE" in os.environ:  # the name that DeepSpeed's launcher uses
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["LOCAL_SIZE"])
    files = [args.deepspeed for args in models]
    if not any(files):
        return
    if len(files) == 1:
        file = files[0]
        named = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        if named != "none" and Path(named).resolve() != Path(file).resolve():
            raise UsageError(f"drop --deepspeed {file}: the launcher's DeepSpeed file is {named}")
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = file
    elif not all(files) and os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        raise UsageError('DeepSpeed trains all models or none: give each a "deepspeed" file')
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"


def check_precision(args, has_gpu: bool) -> None:
    """Raise UsageError if this machine cannot compute in --dtype, or if --tf32 has no effect."""
    if args.dtype == "float16" and not has_gpu:
        raise UsageError("--dtype float16 needs a GPU; on a CPU use bfloat16 or float32")
    if args.dtype == "bfloat16" and has_gpu and not has_bf16():
        raise UsageError(f"{torch.cuda.get_device_name()} has no bfloat16: pass --dtype float16")
    nvidia = has_gpu and torch.version.cuda is not None
    if args.tf32 and not (nvidia and torch.cuda.get_device_capability() >= (8, 0)):
        raise UsageError("--tf32 needs an NVIDIA GPU of the Ampere generation or newer")
    if args.tf32 and args.dtype != "float32":
        raise UsageError(f"--tf32 is for --dtype float32, not {args.dtype}")


def _check_launch(deepspeed: bool) -> None:
    """Raise UsageError if a setting of the launcher would be ignored, or if GPUs are missing."""
    wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
    if deepspeed and wants_cpu:
        raise UsageError("ACCELERATE_USE_CPU or --cpu switches DeepSpeed off: leave it out")
    if wants_cpu and "MASTER_PORT" in os.environ and "RANK" not in os.environ:
        raise UsageError("accelerate launch --cpu starts one process: pass --multi_gpu (DDP)")
    processes, gpus = processes_here(), torch.cuda.device_count()
    if torch.cuda.is_available() and processes > gpus:
        raise UsageError(f"{processes} processes for {gpus} GPUs: start {gpus} on each machine")


def deepspeed_plugin(args, n_models: int = 1) -> DeepSpeedPlugin:
    """Return Accelerate's plugin for the DeepSpeed file in use, or else for the launcher's flags.
    Training flags replace "auto". Raises UsageError if settings are invalid or contradictory."""
    file = file_of(args.deepspeed)
    source = "accelerate launch" if file == "none" else file
    config = resolve(read_config(file), args, int(os.environ.get("WORLD_SIZE", 1)), source)
    strategy = strategy_of(config)
    for name, value in (
        ("zero_stage", str(strategy.stage)),
        ("offload_optimizer_device", strategy.optimizer_on),
        ("offload_param_device", strategy.parameters_on),
    ):
        launched = os.environ.get(f"ACCELERATE_DEEPSPEED_{name.upper()}", "none")
        if launched not in ("none", value):
            raise UsageError(f"the launcher says --{name} {launched}, but {source} gives {value}")
    if file == "none":  # else Accelerate refuses these keys of the launcher's YAML
        os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
    os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)  # "auto" is not a number
    if strategy.stage == 3 and n_models > 1:  # else ZeRO-3 replaces the linear function of all
        config["zero_optimization"]["memory_efficient_linear"] = False
    steps, clip = args.accumulation_steps, config["gradient_clipping"]
    try:
        return DeepSpeedPlugin(config, gradient_accumulation_steps=steps, gradient_clipping=clip)
    except (ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"Accelerate rejects {source}: {reason}") from error


def skip_compiled_communication() -> None:
    """Prevent DeepSpeed from compiling an operation that only DeepSpeed's inference uses."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def set_gloo_interface() -> None:
    """Make gloo listen on the network interface that reaches the first machine.
    By default gloo uses the address of the host name, which is 127.0.1.1 on Debian and Ubuntu."""
    total = int(os.environ.get("WORLD_SIZE", 1))
    if processes_here(total) == total or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))  # UDP: this sends nothing
        here = probe.getsockname()[0]
        for interface, addresses in psutil.net_if_addrs().items():
            if any(each.address == here for each in addresses):
                os.environ["GLOO_SOCKET_IFNAME"] = interface


def exit_rank() -> None:
    """End a rank that has finished or printed its error. Skip Python's shutdown, in which gloo may
    abort. After an error the launcher ends the other ranks, which wait (see `one_line_errors`)."""
    error = sys.exc_info()[1]
    if "RANK" not in os.environ or not isinstance(error, SystemExit | None):
        return
    for thread in threading.enumerate():
        if thread.name == CHECKPOINT_WRITER:  # os._exit would kill this thread
            thread.join()
    for output in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError):  # a closed stream, a full disk or a broken pipe
            output.flush()
    os._exit(error.code if error else 0)
