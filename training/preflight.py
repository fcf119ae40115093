"""Say in one line what is wrong with a launch, before any process is started.

    python -m training.preflight accelerate_config.yaml PROCESSES [training flags]

The script makes the same checks; but once processes run, a launcher adds a page of its own to every
error.
"""

import os
import sys

import yaml
from accelerate.commands.config.config_args import load_config_from_file

from common.errors import UsageError, one_line_errors
from data.dataset import PackedDataset
from model import ConfigError
from training.arguments import parse_arguments
from training.engine.gpu import require_usable_gpus
from training.engine.launch import deepspeed_plugin
from training.initial_weights import InitialWeights
from training.resume import find_starting_point, resumed_arguments
from training.trackers import require_trackers


def check_launch(config_file: str, processes: str, flags: list[str]) -> None:
    """Raises UsageError, ConfigError or DataError: this launch cannot work."""
    if not processes.isdigit() or int(processes) < 1:
        raise UsageError(f"the number of processes must be at least 1, not {processes}")
    args, model_settings = parse_arguments(flags)
    require_trackers(args.trackers)
    require_usable_gpus()
    try:
        config = load_config_from_file(config_file)
        section = getattr(config, "deepspeed_config", None) or {}
        fields = list(section)
        path = section.get("deepspeed_config_file", "none")
    except (OSError, ValueError, TypeError, AttributeError, LookupError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"Accelerate rejects {config_file}: {reason}") from error
    if config.distributed_type == "DEEPSPEED":
        if config.mixed_precision is not None:
            fields.append("mixed_precision")
        os.environ["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(map(str, fields))
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(path)
        os.environ["WORLD_SIZE"] = processes
        deepspeed_plugin(args)
    initial = InitialWeights.find(args.init_from, model_settings)
    train_set = PackedDataset(args.data, "train", initial.max_seq_len)
    train_set.scan()
    model = initial.config(train_set)
    start = find_starting_point(args, quiet=True)
    if start.checkpoint:
        resumed_arguments(start, args, model, train_set, int(processes))
    elif initial.source:
        initial.load()


if __name__ == "__main__":
    with one_line_errors("run_accelerate.sh", UsageError, ConfigError):
        check_launch(sys.argv[1], sys.argv[2], sys.argv[3:])
