"""The engines to choose from: what each divides among the processes, and where it keeps it."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from training.engine.deepspeed_config import BY_WIDTH, offload_device, read_config

GPU, CPU, NVME = "gpu", "cpu", "nvme"
REPOSITORY = Path(__file__).parents[2]
# DeepSpeed's files, by the launcher's configs/NAME.yaml, in the order of the advice: ZeRO-2 before
# ZeRO-3, offload last, and no ZeRO where DDP fits.
FILES = {
    "zero1": "configs/zero1.json",
    "zero2": "ds_config.json",
    "zero3": "configs/zero3.json",
    "zero2_offload": "configs/zero2_offload.json",
    "zero3_offload": "configs/zero3_offload.json",
    "zero_infinity": "configs/zero_infinity.json",
}


@dataclass(frozen=True)
class Kind:
    """An engine, with the settings of its DeepSpeed file that decide memory and traffic.

    Sizes are in elements; their defaults are DeepSpeed's (deepspeed/runtime/zero/config.py and
    offload_config.py).
    """

    config: str = ""  # configs/NAME.yaml; "" if it has no such file
    stage: int | None = None  # of ZeRO; None is DDP, or a single process without engine
    optimizer_on: str = GPU
    parameters_on: str = GPU
    fp32_sums: bool = True  # gradients are added up in fp32, else in the precision of the model
    reduce_bucket: int = 500_000_000  # gradients that are exchanged at once
    reuse_distance: int = 10**9  # ZeRO-3 keeps weights that are used again so soon
    parameter_buffers: int = 5  # buffers for weights on their way from NVMe
    parameter_buffer: int = 100_000_000  # size of such a buffer

    @property
    def name(self) -> str:
        """The name for people, such as "ZeRO-3, optimizer on the CPU"."""
        if self.stage is None:
            return "DDP"
        places = {"optimizer": self.optimizer_on, "parameters": self.parameters_on}
        if self.optimizer_on == self.parameters_on:
            places = {"all": self.optimizer_on}
        where = {CPU: "the CPU", NVME: "NVMe"}
        said = [f", {what} on {where[on]}" for what, on in places.items() if on != GPU]
        return f"ZeRO-{self.stage}{''.join(said)}"

    @property
    def takes_muon(self) -> bool:
        """True if a process has whole matrices to step, on its device."""
        return self.stage != 3 and self.optimizer_on == GPU


DDP = Kind("ddp")


@cache
def engines(dim: int) -> tuple[Kind, ...]:
    """Return the engines of configs/ for a model of this width, in the order of the advice."""
    found = ((name, read_config(str(REPOSITORY / file))) for name, file in FILES.items())
    return DDP, *(replace(kind_of(config, dim), config=name) for name, config in found)


def kind_of(config: dict | None, dim: int = 0) -> Kind:
    """Return the engine of a DeepSpeed configuration; DDP for None.

    Args:
        dim: the width of the model, which "auto" depends on.
    """
    if config is None:
        return DDP
    zero = config["zero_optimization"]
    bucket = zero.get("reduce_bucket_size", Kind.reduce_bucket)
    offload = zero.get("offload_param") or {}
    sums = (config.get("data_types") or {}).get("grad_accum_dtype")
    return Kind(
        stage=zero["stage"],
        optimizer_on=offload_device(config, "optimizer") or GPU,
        parameters_on=offload_device(config, "param") or GPU,
        fp32_sums=sums in ("fp32", "float32"),
        reduce_bucket=int(BY_WIDTH["reduce_bucket_size"](dim) if bucket == "auto" else bucket),
        reuse_distance=int(zero.get("stage3_max_reuse_distance", Kind.reuse_distance)),
        parameter_buffers=int(offload.get("buffer_count", Kind.parameter_buffers)),
        parameter_buffer=int(offload.get("buffer_size", Kind.parameter_buffer)),
    )
