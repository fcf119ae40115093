"""Run a trained model that is larger than a GPU: ZeRO-3 without gradients and optimizer.

Each process stores a part of every parameter, on its device or on the device that "offload_param"
names. While a layer computes, its weights are gathered (https://arxiv.org/abs/2207.00032).
"""

import os

import torch

from lm.common.errors import UsageError
from lm.engine import deepspeed_config
from lm.engine.hardware import default_dtype
from lm.engine.whole_tensors import gathered
from lm.storage.weights import WeightsFolder
from model import Transformer


def config_of_launch(device: str | None, dtype: str | None) -> dict | None:
    """Return a configuration for `load_divided` if the launcher's DeepSpeed file or flags set stage
    3, else None. `dtype` None means `default_dtype`.
    Raises UsageError if the file, the flags or --device cannot be used."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return None
    path = deepspeed_config.file_of(None)
    config = deepspeed_config.read_config(path)
    if config["zero_optimization"].get("stage") != 3:
        return None
    here = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in (None, "auto", here):
        raise UsageError(f"--device {device}: ZeRO-3 runs on {here} here; leave out --device")
    return inference_config(config, path, dtype or default_dtype(here))


def inference_config(config: dict, source: str, dtype: str) -> dict:
    """Return the settings that inference takes from a DeepSpeed configuration. Raises
    UsageError if training refuses these settings, or if parameters are on NVMe."""
    if deepspeed_config.offload_device(config, "param") == "nvme":
        raise UsageError(f"{source}: parameters on NVMe are supported only in training")
    zero = {key: v for key, v in config["zero_optimization"].items() if v != "auto"}
    zero.pop("offload_optimizer", None)  # there is no optimizer
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    if dtype != "float32":
        config[{"bfloat16": "bf16", "float16": "fp16"}[dtype]] = {"enabled": True}
    if problems := [*deepspeed_config.problems_of(config)]:
        raise UsageError(f"{source}: {'; '.join(problems)}")
    return config


def load_divided(config: dict, folder: WeightsFolder) -> Transformer:
    """Load a model and divide it among the processes by ZeRO-3. Every process must call this."""
    import deepspeed

    from lm.engine.engine import KEPT, skip_compiled_communication

    skip_compiled_communication()
    weights = folder.tensors()
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Transformer(folder.config())
    for name, parameter in model.named_parameters():
        with gathered(parameter, writes=True):
            parameter.data.copy_(weights[name])
    engine, *_ = deepspeed.initialize(model=model, config=config)
    KEPT.append(engine)  # never delete its process group, see KEPT
    return engine.module.eval()
