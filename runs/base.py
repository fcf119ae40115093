"""The base of a run with adapters: the frozen weights, which its checkpoints do not repeat.

A copy is in the run's own folder, for the run that they came from may be gone or trained further.
It is a folder of portable weights as any other: scripts.export_hf writes what PEFT adds the
adapter to, scripts.evaluate says how good the model was before.
"""

import shutil
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from common.atomic import whole_folder
from common.errors import UsageError
from formats.portable import CONFIG_FILE, WEIGHTS_FILE, TensorFile, save_portable
from model.config import LMConfig
from model.lora import LoRA
from runs.folder import RunFolder
from runs.manifest import damage_of_files, write_manifest


def write_base(
    run: RunFolder, config: LMConfig, weights: dict[str, Tensor], tokenizer: Path
) -> None:
    """Keep the weights that a new run begins with; before its first step, on the main process.
    Raises UsageError: the disk is full or refuses."""
    try:
        with whole_folder(run.base) as folder:
            save_portable(folder, config, weights)
            write_manifest(folder)
            shutil.copyfile(tokenizer, folder / tokenizer.name)
    except OSError as error:
        raise UsageError(f"{run.base} cannot be written: {error.strerror}") from error


def base_damage(run: RunFolder) -> str | None:
    """What is wrong with a run's base; None if it is sound. Raises as `damage_of_files`."""
    problem = damage_of_files(run.base, {CONFIG_FILE, WEIGHTS_FILE})
    return problem and f"{run.base}: {problem}"


def with_base(
    run: RunFolder, trained: Mapping[str, Tensor], lora: LoRA | None
) -> Mapping[str, Tensor]:
    """All parameters of a model: where only some were trained, the others are the run's base's.
    Raises OSError, SafetensorError: that cannot be read."""
    return ChainMap(trained, TensorFile(run.base / WEIGHTS_FILE)) if lora else trained
