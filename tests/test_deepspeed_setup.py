"""Preparations of DeepSpeed before training; integration/test_engines.py tests the training."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import error_of
from torch.utils import cpp_extension

from lm.engine.deepspeed_setup import load_operation, needed_operations

ON_CPU, ON_NVME = ({"offload_optimizer": {"device": device}} for device in ("cpu", "nvme"))


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        ({"optimizer": {"params": {}}, "zero_optimization": {}}, ["FusedAdamBuilder"]),
        ({"optimizer": {"params": {}}, "zero_optimization": ON_CPU}, ["CPUAdamBuilder"]),
        ({"optimizer": {"params": {"torch_adam": True}}, "zero_optimization": ON_CPU}, []),
        ({"zero_optimization": ON_CPU}, ["CPUAdamBuilder"]),  # Accelerate uses DeepSpeed's Adam
        ({"zero_optimization": ON_CPU, "zero_force_ds_cpu_optimizer": False}, []),
        (
            {"optimizer": {"params": {"torch_adam": True}}, "zero_optimization": ON_NVME},
            ["PinMemoryBuilder", "AsyncIOBuilder"],
        ),
    ],
)
def test_the_operations_that_a_configuration_needs_are_found(config, needed):
    assert needed_operations(config) == needed


def test_compiling_an_operation_is_announced_and_failing_is_one_line(monkeypatch, tmp_path, capsys):
    from deepspeed.ops import op_builder

    builder = SimpleNamespace(name="cpu_adam", load=lambda: None)
    monkeypatch.setattr(op_builder, "CPUAdamBuilder", lambda: builder)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = cpp_extension._get_build_directory("cpu_adam", verbose=False)
    load_operation("CPUAdamBuilder")
    *_, line = capsys.readouterr().out.splitlines()  # DeepSpeed may warn when it is imported
    assert line.startswith(f"DeepSpeed loads cpu_adam from {folder}")
    assert line.endswith(f"delete {folder}/lock")
    monkeypatch.setattr("deepspeed.git_version_info.installed_ops", {"cpu_adam": True})
    load_operation("CPUAdamBuilder")
    assert capsys.readouterr().out == ""
    builder.load = Mock(side_effect=RuntimeError("no header\nand a page of compiler output"))
    line = error_of(load_operation, "CPUAdamBuilder")
    assert "cpu_adam cannot be compiled: no header; " in line
