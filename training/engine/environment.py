"""One form of environment for processes of `accelerate launch`, `deepspeed` and `torchrun`."""

import os
import socket
from contextlib import suppress
from pathlib import Path

import psutil

from common.errors import UsageError
from training.arguments import TrainingArguments

# One process and nobody to meet: port 0 is any that is free.
ALONE = {
    **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
}
INTERFACE = "GLOO_SOCKET_IFNAME"


def take_launch(*models: TrainingArguments) -> None:
    """Have the environment say what `accelerate launch` would have said.

    Where several models are trained, each may name a DeepSpeed file; the launcher's is for the
    others.

    Raises UsageError: --deepspeed contradicts the launcher, or some models have no file.
    """
    if "LOCAL_SIZE" in os.environ:  # as DeepSpeed's launcher calls it
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["LOCAL_SIZE"])
    with_file = [args.run_name for args in models if args.deepspeed]
    if not with_file:
        return
    if len(models) == 1:
        name_configuration(models[0])
    elif len(with_file) < len(models) and os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        raise UsageError(
            f"DeepSpeed trains all models or none: only {', '.join(with_file)} and not the "
            'launcher name a file: add "deepspeed": "ds_config.json" to the others'
        )
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    if "RANK" not in os.environ:
        os.environ.update(ALONE)


def name_configuration(args: TrainingArguments) -> None:
    """Have --deepspeed be the file that the launcher names.

    Raises UsageError: the launcher names another one.
    """
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


def name_interface() -> None:
    """On several machines, name the network interface to gloo where it would take the loopback one.

    Gloo listens at the address of the machine's own name, which Debian and Ubuntu give as
    127.0.1.1: other machines would then look for this one on themselves.
    """
    processes = os.environ.get("WORLD_SIZE", "1")
    if os.environ.get("LOCAL_WORLD_SIZE", processes) == processes or INTERFACE in os.environ:
        return
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if not socket.gethostbyname(socket.gethostname()).startswith("127."):
            return
        probe.connect((os.environ["MASTER_ADDR"], 9))  # looks for a route and sends nothing
        here = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if here in {each.address for each in addresses}:
                os.environ[INTERFACE] = name
