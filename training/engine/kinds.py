"""The engines that one can choose from: what each divides among the processes, and where it keeps
it."""

from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path

from training.engine.deepspeed_config import BY_WIDTH, offload_device, read_config

GPU, CPU, NVME = "gpu", "cpu", "nvme"
REPOSITORY = Path(__file__).parents[2]
# DeepSpeed's files, by the launcher's configs/NAME.yaml. In the order of the advice: ZeRO-2 before
# ZeRO-3, offload last, and no ZeRO where DDP fits.
FILES = {
    "zero1": "configs/zero1.json",
    "zero2": "ds_config.json",
    "zero3": "configs/zero3.json",
    "zero2_offload": "configs/zero2_offload.json",
    "zero3_offload": "configs/zero3_offload.json",
    "zero_infinity": "configs/zero_infinity.json",
}


def number(key: str, default: int):
    """A field that stands under this key in "zero_optimization"; the default is DeepSpeed's."""
    return field(default=default, metadata={"key": key})


@dataclass(frozen=True)
class Kind:
    """One of them, with what memory and traffic depend on in its DeepSpeed file. Sizes are in
    elements (deepspeed/runtime/zero/config.py and offload_config.py)."""

    config: str = ""  # its file, configs/NAME.yaml; "" if it has none
    stage: int | None = None  # of ZeRO; None is DDP, or a single process without engine
    optimizer_on: str = GPU
    parameters_on: str = GPU
    fp32_sums: bool = True  # gradients are added up in fp32, else in the precision of the model
    # Gradients that are exchanged at once.
    reduce_bucket: int = number("reduce_bucket_size", 500_000_000)
    # ZeRO-3: weights that are used again so soon are not let go of, nor parameters up to a size;
    # others are fetched ahead until so many are there.
    reuse_distance: int = number("stage3_max_reuse_distance", 10**9)
    persistence: int = number("stage3_param_persistence_threshold", 100_000)
    live: int = number("stage3_max_live_parameters", 10**9)
    # On the way from NVMe, in RAM: a sub-group of the optimizer's state in each of its buffers.
    sub_group: int = number("sub_group_size", 10**9)
    optimizer_buffers: int = number("offload_optimizer.buffer_count", 4)
    parameter_buffers: int = number("offload_param.buffer_count", 5)
    parameter_buffer: int = number("offload_param.buffer_size", 100_000_000)
    in_ram: int = number("offload_param.max_in_cpu", 10**9)  # of parameters on NVMe

    @property
    def name(self) -> str:
        """For people."""
        if self.stage is None:
            return "DDP"
        places = {"optimizer": self.optimizer_on, "parameters": self.parameters_on}
        if self.optimizer_on == self.parameters_on:
            places = {"all": self.optimizer_on}
        where = {CPU: "the CPU", NVME: "NVMe"}
        said = [f", {what} on {where[on]}" for what, on in places.items() if on != GPU]
        return f"ZeRO-{self.stage}{''.join(said)}"

    @property
    def offloads(self) -> bool:
        return self.optimizer_on != GPU or self.parameters_on != GPU

    @property
    def takes_muon(self) -> bool:
        """Whether a process has whole matrices to step, on its device."""
        return self.stage != 3 and not self.offloads


DDP = Kind("ddp")


@cache
def engines(dim: int) -> tuple[Kind, ...]:
    """Those of configs/, for a model of this width, in the order of the advice."""
    found = ((name, read_config(str(REPOSITORY / file))) for name, file in FILES.items())
    return DDP, *(replace(kind_of(config, dim), config=name) for name, config in found)


def kind_of(config: dict | None, dim: int = 0) -> Kind:
    """The engine of a DeepSpeed configuration; DDP of None.

    Args:
        dim: the width of the model, which "auto" depends on.
    """
    if config is None:
        return DDP
    zero, numbers = config["zero_optimization"], {}
    for item in fields(Kind):
        section, _, key = item.metadata.get("key", "").rpartition(".")
        value = ((zero.get(section) or {}) if section else zero).get(key)
        if value is not None:
            numbers[item.name] = int(BY_WIDTH[key](dim) if value == "auto" else value)
    places = [offload_device(config, what) or GPU for what in ("optimizer", "param")]
    sums = (config.get("data_types") or {}).get("grad_accum_dtype")
    fp32 = str(sums).removeprefix("torch.") in ("fp32", "float32", "float")
    return Kind("", zero["stage"], *places, fp32_sums=fp32, **numbers)
