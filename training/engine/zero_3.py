"""ZeRO-3 before training: a model that no process ever holds whole, and a place for its parts."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from common.errors import UsageError
from model import Transformer
from runs.folder import lock
from training.engine.deepspeed_config import nvme_folders
from training.engine.kinds import NVME, Kind
from training.engine.launch import Engine
from training.engine.main_process import on_every_process

SWAPPED_BYTES = 2**20  # smaller shares stay in RAM: MIN_AIO_BYTES, deepspeed/runtime/swap_tensor


def divided_as_built(engine: Engine) -> AbstractContextManager:
    """Build a model in here. ZeRO-3 divides the parameters of a layer as soon as they are there.

    They are what they would be without it: DeepSpeed's own context makes layers in 16 bits and on
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
    """Lock the folders on NVMe: DeepSpeed gives the files of all runs the same names.

    All must call this. Raises UsageError: another run has one, or the system refuses.
    """

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


def require_buffers(kind: Kind, shapes: Transformer, processes: int, itemsize: int) -> None:
    """Raise UsageError if a weight does not fit into a buffer through which it comes from NVMe, or
    too many weights would stay in them: DeepSpeed ends in an assertion then.

    Args:
        shapes: the model; only the shapes of its parameters are looked at.
        itemsize: bytes of a weight, as it is computed with.
    """
    if kind.parameters_on != NVME:
        return
    shares = [-(-p.numel() // processes) for p in shapes.parameters()]
    swapped = [share for share in shares if share * itemsize >= SWAPPED_BYTES]
    largest = max(swapped, default=0)
    if largest > kind.parameter_buffer:
        raise UsageError(
            f'"offload_param": a weight of this model has {largest:,} elements on each process, '
            f'more than its "buffer_size" of {kind.parameter_buffer:,}: make it {largest}'
        )
    if kind.reuse_distance and len(swapped) > kind.parameter_buffers:
        raise UsageError(
            f'"offload_param" has {kind.parameter_buffers} buffers, and {len(swapped)} weights may '
            'stay in them to be used again: write "stage3_max_reuse_distance": 0, or '
            f'"buffer_count": {len(swapped)}'
        )
