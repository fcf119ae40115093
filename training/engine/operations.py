"""Operations of DeepSpeed's own, which are compiled when they are first used: a minute or more."""

from pathlib import Path

from common.errors import UsageError
from training.engine.deepspeed_config import nvme_folders, offload_device
from training.engine.launch import Engine
from training.engine.main_process import on_every_process


def own_operations(config: dict) -> list[str]:
    """Return what a DeepSpeed configuration needs, by DeepSpeed's names for its builders."""
    offload = offload_device(config, "optimizer")
    adam = config.get("optimizer")
    if adam is None:  # the script's, which is exchanged for DeepSpeed's
        own_adam = offload and config.get("zero_force_ds_cpu_optimizer", True)
    else:
        own_adam = not adam["params"].get("torch_adam")
    names = ["CPUAdamBuilder" if offload else "FusedAdamBuilder"] if own_adam else []
    return names + (["PinMemoryBuilder", "AsyncIOBuilder"] if nvme_folders(config) else [])


def compile_operations(engine: Engine) -> None:
    """Compile on every machine, before its processes load; all must call this.

    Raises UsageError: an operation cannot be compiled.
    """
    if engine.deepspeed is None:
        return
    names = own_operations(engine.deepspeed) if engine.accelerator.is_local_main_process else []
    on_every_process(engine, lambda: [_load(name) for name in names])


def _load(name: str) -> None:
    """Load one operation; say first what takes so long, for PyTorch compiles without a word."""
    from deepspeed.ops import op_builder  # seconds to import
    from torch.utils import cpp_extension  # it changes sys.path

    builder = getattr(op_builder, name)()
    folder = Path(cpp_extension._get_build_directory(builder.name, verbose=False))
    if not (folder / f"{builder.name}.so").exists():
        print(
            f"DeepSpeed compiles {builder.name} in {folder}: minutes, once (if it was killed "
            "before, delete the file lock in there, or it waits for ever)",
            flush=True,
        )
    try:
        builder.load()
    except Exception as error:  # whatever a compiler or its absence brings about
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"DeepSpeed's {builder.name} cannot be compiled: {reason}; Adam needs ninja and a "
            'compiler, or "torch_adam": true under "optimizer", "params"; NVMe needs libaio-dev'
        ) from error
