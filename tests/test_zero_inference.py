import json

import pytest

from lm.common.errors import UsageError
from lm.engine.zero_inference import config_of_launch


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Makes the configuration of a launch whose DeepSpeed file has this "zero_optimization"."""

    def launch(device=None, **zero) -> dict | None:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"zero_optimization": zero, "optimizer": {"type": "AdamW"}}))
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
        return config_of_launch(device, None)

    return launch


def test_the_configuration_leaves_out_the_optimizer_and_auto_values(launched):
    offload = {"device": "cpu", "pin_memory": True}
    zero = {"stage": 3, "offload_param": offload, "stage3_prefetch_bucket_size": 1000}
    left_out = {"offload_optimizer": offload, "reduce_bucket_size": "auto"}
    found = launched(**zero, **left_out)
    assert found == {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}


@pytest.mark.parametrize(
    ("device", "zero", "line"),
    [
        ("cuda:1", {}, "--device cuda:1: ZeRO-3 runs on cpu here; leave out --device"),
        (None, {"offload_param": {"device": "nvme"}}, "are supported only in training"),
        # Training refuses the two settings below too.
        (None, {"offload_parm": {"device": "cpu"}}, "DeepSpeed rejects .*offload_parm"),
        (None, {"zero_quantized_weights": True}, 'remove "zero_optimization.zero_quant'),
    ],
)
def test_settings_that_cannot_work_are_refused(launched, device, zero, line):
    with pytest.raises(UsageError, match=line):
        launched(device, stage=3, **zero)
