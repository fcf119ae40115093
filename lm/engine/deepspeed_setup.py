"""Prepare DeepSpeed before training: NVMe folders, compiled operations, a partitioned model."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lm.common.errors import UsageError
from lm.engine.agreement import on_every_process
from lm.engine.deepspeed_config import nvme_folders, offload_device
from lm.engine.engine import Engine
from lm.storage.folder import lock


def partitioned_while_built(engine: Engine) -> AbstractContextManager:
    """Return a context in which to build a model. Under ZeRO-3 it divides each layer as soon as the
    layer exists. The initial weights are the same as under the other engines. DeepSpeed's own
    context would draw these weights in --dtype on the GPU, with other random numbers."""
    if not engine.divides_model:
        return nullcontext()
    from deepspeed.runtime.zero.partition_parameters import Init  # importing it takes seconds

    class SameWeightsInit(Init):
        def _post_init_method(self, module):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(self.dtype)
            super()._post_init_method(module)

    return SameWeightsInit(config_dict_or_path=engine.deepspeed, tensor_overrides=())


def set_up_deepspeed(engine: Engine) -> None:
    """Lock NVMe folders and compile DeepSpeed's operations. Every process must call this.
    Raises UsageError if a folder cannot be used, or if an operation cannot be compiled."""

    def attempt() -> None:
        if engine.accelerator.is_local_main_process:
            for folder in nvme_folders(engine.deepspeed):
                # All runs use the same file names in this folder.
                lock(Path(folder, "lock"), otherwise='"nvme_path"')
            for name in needed_operations(engine.deepspeed):
                load_operation(name)

    if engine.deepspeed is not None:
        on_every_process(engine, attempt)


def launch_fewer_kernels(zero) -> None:
    """Make DeepSpeed's optimizer of ZeRO-1 and 2 launch few kernels between the gradients and their
    update. Its own code launches about 15 for each parameter, which on an H200 took longer than the
    forward and backward pass of a model of 5 million parameters (docs/performance.md).
    Without `check_overflow`, DeepSpeed still skips a step whose norm is not finite."""
    if getattr(zero, "compute_grad_norm", False) and not zero.cpu_offload:
        zero.check_overflow = lambda partition_gradients: None
        zero.get_grad_norm_direct = partial(gradient_norm, zero)


def gradient_norm(zero, gradients: list[Tensor], parameters: list[Tensor]) -> Tensor:
    """Return the norm of a group's gradients on all processes, fp32, or -1 if it is not finite.
    `gradients` are of this process; some are padding."""
    own = [gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False)]
    total = torch.zeros((), dtype=torch.float64, device=zero.device)
    if own:
        total += torch.stack(torch._foreach_norm(own, dtype=torch.float64)).square().sum()
    total = total.float()
    torch.distributed.all_reduce(total, group=zero.dp_process_group)
    return torch.where(total.isfinite(), total.sqrt(), -1.0)


def needed_operations(config: dict) -> list[str]:
    """Return the builder names of the DeepSpeed operations that a configuration needs."""
    names = []
    offload = offload_device(config, "optimizer")
    if "optimizer" in config:
        deepspeed_adam = not config["optimizer"]["params"].get("torch_adam")
    else:  # with offload, Accelerate replaces our AdamW by DeepSpeed's version for the CPU
        deepspeed_adam = offload and config.get("zero_force_ds_cpu_optimizer", True)
    if deepspeed_adam:
        names.append("CPUAdamBuilder" if offload else "FusedAdamBuilder")
    if nvme_folders(config):
        names += ["PinMemoryBuilder", "AsyncIOBuilder"]
    return names


def load_operation(name: str) -> None:
    """Load one of DeepSpeed's operations; print a line if it may have to be compiled, because it is
    not installed. Raises UsageError if it cannot be compiled."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops import op_builder  # importing it takes seconds
    from torch.utils import cpp_extension  # importing it changes sys.path

    builder = getattr(op_builder, name)()
    if not installed_ops.get(builder.name):
        folder = cpp_extension._get_build_directory(builder.name, verbose=False)
        print(
            f"DeepSpeed loads {builder.name} from {folder}; compiling it, once, takes minutes. "
            f"If it does not end, an earlier compilation was killed: delete {folder}/lock",
            flush=True,
        )
    try:
        builder.load()
    except Exception as error:  # a compiler that is missing or broken can raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"DeepSpeed's {builder.name} cannot be compiled: {reason}; for Adam, install ninja and "
            'a compiler, or set "torch_adam": true in "params"; for NVMe, install libaio-dev'
        ) from error
