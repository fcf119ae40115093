"""A trained model that is larger than a GPU: ZeRO-3 without gradients and optimizer.

Every process has its share of each parameter, on its device or where "offload_param" says. The
weights of a layer come together while it computes (ZeRO-Inference, https://arxiv.org/abs/2207.00032).
"""

import os
from dataclasses import dataclass

import torch

from common.errors import UsageError
from model import Transformer
from storage.weights import WeightsFolder
from training.engine.deepspeed_config import (
    check_by_deepspeed,
    offload_device,
    read_config,
    refuse_keys,
)
from training.engine.partition import gathered


@dataclass
class ZeroInference:
    config: dict  # DeepSpeed's

    @classmethod
    def of_launch(cls, device: str | None, dtype: str | None) -> "ZeroInference | None":
        """Return ZeRO-3 as the launcher asked for it, None for another engine.
        Raises UsageError: its file or this device cannot be used."""
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
            return None
        path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        config = read_config(path)
        if config["zero_optimization"].get("stage") != 3:
            return None
        own = "cuda" if torch.cuda.is_available() else "cpu"
        if device not in (None, "auto", own):
            raise UsageError(f"--device {device}: ZeRO-3 takes {own} here, leave it out")
        return cls.of_config(config, path, dtype or ("bfloat16" if own == "cuda" else "float32"))

    @classmethod
    def of_config(cls, config: dict, source: str, dtype: str = "float32") -> "ZeroInference":
        """Return ZeRO-3 by the part of a configuration that is not about training.
        Raises UsageError: as in training, or parameters are on NVMe."""
        if offload_device(config, "param") == "nvme":
            raise UsageError(f"{source}: only training keeps parameters on NVMe")
        section = {k: v for k, v in config["zero_optimization"].items() if v != "auto"}
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": section}
        if dtype != "float32":
            config[{"bfloat16": "bf16", "float16": "fp16"}[dtype]] = {"enabled": True}
        if problems := refuse_keys(config):
            raise UsageError(f"{source}: {'; '.join(problems)}")
        section.pop("offload_optimizer", None)
        check_by_deepspeed(config, source)
        return cls(config)

    def load(self, folder: WeightsFolder) -> Transformer:
        """Load the model in shares; all processes must call it."""
        import deepspeed

        from training.engine.launch import KEPT, skip_compiled_communication

        skip_compiled_communication()
        weights = folder.sound_tensors()
        with deepspeed.zero.Init(config_dict_or_path=self.config):
            model = Transformer(folder.config())
        for name, parameter in model.named_parameters():
            with gathered(parameter, writes=True):
                parameter.data.copy_(weights[name])
        engine, *_ = deepspeed.initialize(model=model, config=self.config)
        KEPT.append(engine)
        return engine.module.eval()
