"""Operations that DeepSpeed compiles: which an engine needs, and what is said of them."""

from types import SimpleNamespace

import pytest
from torch.utils import cpp_extension

from common.errors import UsageError
from training.engine import operations
from training.engine.operations import own_operations

CPU, NVME = ({"device": device} for device in ("cpu", "nvme"))
NVME_OPERATIONS = ["PinMemoryBuilder", "AsyncIOBuilder"]


@pytest.mark.parametrize(
    ("params", "offload", "needed"),
    [
        ({"torch_adam": True}, {}, []),
        ({}, {}, ["FusedAdamBuilder"]),
        ({}, {"offload_optimizer": CPU}, ["CPUAdamBuilder"]),
        ({"torch_adam": True}, {"offload_optimizer": CPU}, []),
        (None, {}, []),
        (None, {"offload_optimizer": CPU}, ["CPUAdamBuilder"]),  # Accelerate exchanges the script's
        ({"torch_adam": True}, {"offload_optimizer": NVME}, NVME_OPERATIONS),
        ({"torch_adam": True}, {"offload_param": NVME}, NVME_OPERATIONS),
    ],
)
def test_what_an_engine_needs(params, offload, needed):
    config = {"zero_optimization": offload}
    if params is not None:
        config["optimizer"] = {"params": params}
    assert own_operations(config) == needed


def test_an_optimizer_that_is_not_to_be_exchanged_needs_nothing():
    config = {"zero_optimization": {"offload_optimizer": CPU}}
    assert own_operations(config | {"zero_force_ds_cpu_optimizer": False}) == []


@pytest.fixture
def cpu_adam(tmp_path, monkeypatch):
    """Its builder, which fails or does nothing; the folder in which it would compile."""
    from deepspeed.ops import op_builder

    def builder(error: str | None):
        def load():
            if error:
                raise RuntimeError(error)

        fake = SimpleNamespace(name="cpu_adam", load=load)
        monkeypatch.setattr(op_builder, "CPUAdamBuilder", lambda: fake)
        return cpp_extension._get_build_directory("cpu_adam", verbose=False)

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return builder


def test_what_a_start_waits_for_is_named_before_it_waits(cpu_adam, capsys):
    folder = cpu_adam(error=None)
    operations._load("CPUAdamBuilder")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("DeepSpeed's cpu_adam is compiled at its first use")
    assert folder in line
    assert "delete the file lock" in line
    with open(f"{folder}/cpu_adam.so", "w"):
        pass
    operations._load("CPUAdamBuilder")
    assert capsys.readouterr().out == ""


def test_what_cannot_be_compiled_is_one_line(cpu_adam):
    cpu_adam(error="no header\nand a page of the compiler's")
    with pytest.raises(UsageError, match="cpu_adam cannot be compiled: no header; ") as error:
        operations._load("CPUAdamBuilder")
    assert "\n" not in str(error.value)
