"""What DeepSpeed needs before training; the model that it builds: integration/test_engines.py."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils import cpp_extension

from common.errors import UsageError
from model import LMConfig, Transformer
from runs.folder import release_locks
from training.engine.deepspeed_setup import (
    claim,
    load_operation,
    own_operations,
    require_buffers,
)
from training.engine.estimate import NVME, Kind

CPU_ONLY, ON_NVME = ({"device": device} for device in ("cpu", "nvme"))
NVME_OPERATIONS = ["PinMemoryBuilder", "AsyncIOBuilder"]


def test_two_runs_do_not_share_a_folder_on_nvme(tmp_path):
    claim(tmp_path / "new" / "one")
    claim(tmp_path / "two")
    with pytest.raises(UsageError, match=r'one is in use by .* take another "nvme_path"'):
        claim(tmp_path / "new" / "one")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file, for NVMe, cannot be used"):
        claim(tmp_path / "file")
    release_locks()


def on_nvme(**numbers: int) -> Kind:
    return Kind("", 3, parameters_on=NVME, **{"reuse_distance": 0} | numbers)


@pytest.fixture(scope="module")
def shapes() -> Transformer:
    """4 layers with 7 matrices each, and a larger matrix, which is tied."""
    shape = {"dim": 1024, "n_layers": 4, "n_heads": 16, "n_kv_heads": 16, "hidden_dim": 1664}
    with torch.device("meta"):
        return Transformer(LMConfig(**shape, vocab_size=9000))


def test_weights_that_are_not_let_go_of_need_a_buffer_each(shapes):
    with pytest.raises(UsageError, match='"buffer_count" of 29 in "offload_param"'):
        require_buffers(on_nvme(reuse_distance=10**9, parameter_buffers=28), shapes, 2, 4)
    require_buffers(on_nvme(reuse_distance=10**9, parameter_buffers=29), shapes, 2, 4)
    require_buffers(on_nvme(), shapes, 2, 4)
    require_buffers(Kind("", 3, parameter_buffers=0), shapes, 2, 4)  # they are elsewhere
    small = on_nvme(reuse_distance=1, parameter_buffers=0)
    require_buffers(small, shapes, 64, 2)  # shares that stay in RAM


def test_a_weight_larger_than_a_buffer_is_refused_with_the_size_it_takes(shapes):
    largest = 1024 * 9000 // 4
    require_buffers(on_nvme(parameter_buffer=largest), shapes, 4, 2)
    with pytest.raises(UsageError, match=f'"buffer_size" of {largest} in'):
        require_buffers(on_nvme(parameter_buffer=largest - 1), shapes, 4, 2)


@pytest.mark.parametrize(
    ("params", "offload", "needed"),
    [
        ({}, {}, ["FusedAdamBuilder"]),
        ({}, {"offload_optimizer": CPU_ONLY}, ["CPUAdamBuilder"]),
        ({"torch_adam": True}, {"offload_optimizer": CPU_ONLY}, []),
        (
            None,
            {"offload_optimizer": CPU_ONLY},
            ["CPUAdamBuilder"],
        ),  # exchanged
        ({"torch_adam": True}, {"offload_optimizer": ON_NVME}, NVME_OPERATIONS),
    ],
)
def test_what_an_engine_needs(params, offload, needed):
    config = {"zero_optimization": offload}
    if params is not None:
        config["optimizer"] = {"params": params}
    assert own_operations(config) == needed


def test_an_optimizer_that_is_not_to_be_exchanged_needs_nothing():
    config = {"zero_optimization": {"offload_optimizer": CPU_ONLY}}
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
    load_operation("CPUAdamBuilder")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("DeepSpeed compiles cpu_adam")
    assert folder in line
    assert "delete the file lock" in line
    with open(f"{folder}/cpu_adam.so", "w"):
        pass
    load_operation("CPUAdamBuilder")
    assert capsys.readouterr().out == ""


def test_what_cannot_be_compiled_is_one_line(cpu_adam):
    cpu_adam(error="no header\nand a page of the compiler's")
    with pytest.raises(UsageError, match="cpu_adam cannot be compiled: no header; ") as error:
        load_operation("CPUAdamBuilder")
    assert "\n" not in str(error.value)
