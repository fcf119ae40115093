"""Flags of the programs in which a trained model writes, and the model that they name."""

import argparse
import os
from collections.abc import Callable
from dataclasses import fields

from common.errors import UsageError
from inference.prompts import say
from inference.sampling import MEANINGS, Sampling
from storage.find import BEST


def add_model_flags(add: Callable) -> None:
    """Add the run, --device, --dtype and the fields of `Sampling` but the seed to a parser."""
    runs = "run folder, RUN@best (at its lowest validation), checkpoint or weights; 'auto' is the "
    add("run", metavar="RUN", help=runs + "newest run")
    add("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    dtypes = "of the weights (default: float32 on a CPU, bfloat16 on a GPU)"
    add("--dtype", choices=("float32", "bfloat16"), help=dtypes)
    for field in fields(Sampling):
        if help := MEANINGS.get(field.name):
            add(f"--{field.name}", type=field.type, default=field.default, help=help)


def at_least_1(typed: str) -> int:
    """Parse a flag's value."""
    if int(typed) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {typed}")
    return int(typed)


def sampling_of(args: argparse.Namespace) -> Sampling:
    """Return what the flags describe. Raises UsageError: a value outside its limits."""
    names = {field.name for field in fields(Sampling)}
    try:
        return Sampling(**{name: value for name, value in vars(args).items() if name in names})
    except ValueError as error:
        raise UsageError(f"--{error}") from error


def load(args: argparse.Namespace):
    """Return the Decoder and `Trained` that the flags name. Raises UsageError: there is none."""
    import torch

    from inference.decoder import Decoder
    from storage.weights import WeightsFolder, load_trained
    from training.engine.zero_inference import ZeroInference

    zero = ZeroInference.of_launch(args.device, args.dtype)
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.zeros(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {name} cannot be used here: {reason}") from error
    trained = load_trained(args.run, zero.load if zero else WeightsFolder.load)
    if args.run == "auto" or args.run.endswith(BEST):
        say(f"weights: {trained.folder}")
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    model = trained.model if zero else trained.model.to(device)
    return Decoder(model, dtype, divided=zero is not None), trained


def load_to_talk(args: argparse.Namespace):
    """Do as `load` for a conversation; say so where the model has not learned to answer."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UsageError("one process talks: start it without a launcher, with python -m")
    decoder, trained = load(args)
    if not trained.chats:
        say("these weights have learned from no conversations: they write on where others answer")
    return decoder, trained
