"""ZeRO-3 before training: a model that no process ever holds whole, and a place for its parts."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch import nn

from common.errors import UsageError
from model import Transformer
from runs.lock import lock
from training.engine.deepspeed_config import nvme_folders
from training.engine.kinds import NVME, Kind
from training.engine.launch import Engine
from training.engine.main_process import on_every_process

SWAPPED_BYTES = 2**20  # smaller shares stay in RAM: MIN_AIO_BYTES, deepspeed/runtime/swap_tensor


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


def require_buffers(kind: Kind, shapes: Transformer, processes: int, itemsize: int) -> None:
    """A weight that comes from NVMe has a buffer until it is let go of. With a reuse distance
    above 0, none is that comes again within it, there and back: a block's at least, which come
    again where it is recomputed. With all buffers taken DeepSpeed ends in an assertion, in the
    second step.

    Args:
        shapes: the model; only the shapes of its parameters are looked at.
        itemsize: bytes of a weight, as it is computed with.

    Raises UsageError: there are too few buffers, or they are too small.
    """
    if kind.parameters_on != NVME:
        return

    def shares(part: nn.Module) -> dict[nn.Parameter, int]:
        found = {p: -(-p.numel() // processes) for p in part.parameters()}
        return {p: share for p, share in found.items() if share * itemsize >= SWAPPED_BYTES}

    largest = max(shares(shapes).values(), default=0)
    if largest > kind.parameter_buffer:
        raise UsageError(
            f'"offload_param": a weight of this model has {largest:,} elements on each process, '
            f'more than its "buffer_size" of {kind.parameter_buffer:,}: make it {largest}'
        )
    kept, after = shares(shapes.output), 0  # where it is tied, the embedding's is the same
    for part in [*reversed(shapes.layers), shapes.tok_embeddings]:
        if 2 * after >= kind.reuse_distance:
            break
        kept |= shares(part)
        after += sum(p.numel() for p in part.parameters())
    if len(kept) > kind.parameter_buffers:
        raise UsageError(
            f'"offload_param" has {kind.parameter_buffers} buffers, and a "stage3_max_reuse_'
            f'distance" of {kind.reuse_distance:,} would keep {len(kept)} weights in them: write '
            f'"stage3_max_reuse_distance": 0, or "buffer_count": {len(kept)}'
        )
