"""Operations of DeepSpeed's own, which are compiled when they are first used: a minute or more."""

from pathlib import Path

from common.errors import UsageError
from training.engine.deepspeed_config import nvme_folders, offload_device
from training.engine.launch import Engine
from training.engine.main_process import on_every_process


def own_operations(config: dict) -> list[str]:
    """Those that a DeepSpeed configuration needs, by DeepSpeed's names for what builds them."""
    offload = offload_device(config, "optimizer")
    adam = config.get("optimizer")
    if adam is None:  # the script's, which is exchanged for theirs
        own_adam = offload and config.get("zero_force_ds_cpu_optimizer", True)
    else:
        own_adam = not adam["params"].get("torch_adam")
    names = []
    if own_adam:
        names.append("CPUAdamBuilder" if offload else "FusedAdamBuilder")
    if nvme_folders(config):
        names += ["PinMemoryBuilder", "AsyncIOBuilder"]
    return names


def compile_operations(engine: Engine) -> None:
    """Once on every machine, before its processes load them; all must call this. Raises UsageError:
    one cannot be compiled."""
    names = own_operations(engine.deepspeed) if engine.deepspeed else []

    def attempt() -> None:
        if engine.accelerator.is_local_main_process:
            for name in names:
                _compile(name)

    if names:
        on_every_process(engine, attempt)


def _compile(name: str) -> None:
    """Have one ready; says first what takes so long."""
    from deepspeed.ops import op_builder  # seconds to import

    builder = getattr(op_builder, name)()
    if not _comes_compiled(builder.name):
        _say_what_it_waits_for(builder.name)
    try:
        builder.load()
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f'DeepSpeed\'s {builder.name} cannot be compiled: {reason}; an "optimizer" with '
            '"torch_adam": true takes PyTorch\'s, offloading to NVMe has no other way'
        ) from error


def _comes_compiled(operation: str) -> bool:
    """Whether DeepSpeed was installed with it (DS_BUILD_OPS=1), as its `OpBuilder.load` decides."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name, installed_ops

    return installed_ops.get(operation, False) and accelerator_name == get_accelerator()._name


def _say_what_it_waits_for(operation: str) -> None:
    """That it compiles, or for which file it waits, if there is one: PyTorch does both without a
    word, and waits for ever where a compilation was killed."""
    from torch.utils import cpp_extension  # it changes sys.path

    folder = Path(cpp_extension._get_build_directory(operation, verbose=False))
    lock = folder / "lock"
    if lock.exists():
        print(
            f"waiting for {lock}: another program compiles DeepSpeed's {operation}; if none does, "
            "one that was killed has left the file: delete it",
            flush=True,
        )
    elif not (folder / f"{operation}.so").exists():
        print(f"compiling DeepSpeed's {operation}, once, for minutes: {folder}", flush=True)
