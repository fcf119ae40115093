"""Before DeepSpeed trains: folders on NVMe, compiled operations, a divided model."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from common.errors import UsageError
from storage.folder import lock
from training.engine.deepspeed_config import nvme_folders, offload_device
from training.engine.launch import Engine
from training.engine.main_process import on_every_process


def divided_as_built(engine: Engine) -> AbstractContextManager:
    """Build a model in here. ZeRO-3 divides each layer as soon as it is there.

    DeepSpeed's own context draws other random numbers, in 16 bits and on the GPU.
    """
    if not engine.divides_model:
        return nullcontext()
    from deepspeed.runtime.zero.partition_parameters import Init  # seconds to import

    class AsWithout(Init):
        def _post_init_method(self, module):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(self.dtype)
            super()._post_init_method(module)

    return AsWithout(config_dict_or_path=engine.deepspeed, tensor_overrides=())


def set_up_deepspeed(engine: Engine) -> None:
    """Claim the folders on NVMe and compile operations; all must call this.
    Raises UsageError: one of these cannot be done."""

    def attempt() -> None:
        if engine.accelerator.is_local_main_process:
            for folder in map(Path, nvme_folders(engine.deepspeed)):
                claim(folder)
            for name in own_operations(engine.deepspeed):
                load_operation(name)

    if engine.deepspeed is not None:
        on_every_process(engine, attempt)


def claim(folder: Path) -> None:
    """Lock a folder on NVMe: DeepSpeed gives the files of all runs the same names."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock(folder / "lock", otherwise='"nvme_path"')
    except OSError as error:
        raise UsageError(f"{folder}, for NVMe, cannot be used: {error.strerror}") from error


def own_operations(config: dict) -> list[str]:
    """Return the builders of DeepSpeed's own operations that a configuration needs."""
    offload = offload_device(config, "optimizer")
    adam = config.get("optimizer")
    if adam is None:  # the script's, which is exchanged for DeepSpeed's
        own_adam = offload and config.get("zero_force_ds_cpu_optimizer", True)
    else:
        own_adam = not adam["params"].get("torch_adam")
    names = ["CPUAdamBuilder" if offload else "FusedAdamBuilder"] if own_adam else []
    return names + (["PinMemoryBuilder", "AsyncIOBuilder"] if nvme_folders(config) else [])


def load_operation(name: str) -> None:
    """Load one operation; say so if it is compiled now.
    Raises UsageError: it cannot be compiled."""
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
