"""ZeRO-3 before training: a model that no process ever holds whole, and folders for its parts."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from common.errors import UsageError
from runs.lock import lock
from training.engine.deepspeed_config import nvme_folders
from training.engine.launch import Engine
from training.engine.main_process import on_every_process


def divided_as_built(engine: Engine) -> AbstractContextManager:
    """In here a model is built. With ZeRO-3 the parameters of every layer are divided among the
    processes as soon as they are there.

    They are what they would be otherwise: DeepSpeed's own context has layers made in 16 bits and on
    the GPU, where other random numbers are drawn.
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


def claim_folders(engine: Engine) -> None:
    """Let no other run write to those that are on NVMe: DeepSpeed gives files of all runs the same
    names. All must call this. Raises UsageError: another run does, or the system refuses."""

    def attempt() -> None:
        for folder in map(Path, nvme_folders(engine.deepspeed) if engine.deepspeed else ()):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if engine.accelerator.is_local_main_process:
                    lock(folder / "lock", otherwise='"nvme_path"')
            except OSError as error:
                raise UsageError(f"{folder}, for NVMe, cannot be used: {error.strerror}") from error

    if engine.divides_model:
        on_every_process(engine, attempt)
