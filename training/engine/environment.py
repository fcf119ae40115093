"""What launchers tell a process by its environment, in one form whichever of them it was:
`accelerate launch`, `deepspeed`, `torchrun`, or none."""

import os
from pathlib import Path

from common.errors import UsageError
from training.arguments import TrainingArguments

# One process and nobody to meet: port 0 is any that is free.
ALONE = {
    **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
}


def take_launch(args: TrainingArguments) -> None:
    """Have the environment say what `accelerate launch` would have said.

    Raises UsageError: --deepspeed, or what launchers append, contradicts the launcher.
    """
    if "LOCAL_SIZE" in os.environ:  # as DeepSpeed's launcher calls it
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["LOCAL_SIZE"])
    name_configuration(args)
    if args.deepspeed and "RANK" not in os.environ:
        os.environ.update(ALONE)


def name_configuration(args: TrainingArguments) -> None:
    """Have --deepspeed be the file that the launcher names. Raises UsageError: it names another."""
    if args.deepspeed is None:
        return
    named = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if named != "none" and Path(named).resolve() != Path(args.deepspeed).resolve():
        raise UsageError(
            f"--deepspeed is {args.deepspeed}, but the launcher's DeepSpeed file is {named}: "
            "name one of them"
        )
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = args.deepspeed
