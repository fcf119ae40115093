"""Define the flags that generate, chat and serve share, and load the model of RUN."""

import argparse
import os
from collections.abc import Callable
from dataclasses import fields
from functools import partial

from lm.common.errors import UsageError
from lm.inference.prompts import say
from lm.inference.sampling import MEANINGS, Sampling
from lm.storage.find import BEST


def add_model_flags(add: Callable) -> None:
    """Add RUN, --device, --dtype and a flag for each field of `Sampling` except the seed."""
    runs = "run, RUN@best (lowest validation loss), checkpoint, weights, or 'auto' (newest run)"
    add("run", metavar="RUN", help=runs)
    add("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    text = "default: bfloat16 on a GPU (float16 if it has no bfloat16), float32 on a CPU"
    add("--dtype", choices=("float32", "bfloat16", "float16"), help=text)
    for field in fields(Sampling):
        if field.name in MEANINGS:
            meaning = MEANINGS[field.name]
            add(f"--{field.name}", type=field.type, default=field.default, help=meaning)


def at_least_1(typed: str) -> int:
    """Parse an integer. Raises ArgumentTypeError for other text and for numbers below 1."""
    if not typed.isdecimal() or int(typed) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, not {typed}")
    return int(typed)


def sampling_of(args: argparse.Namespace) -> Sampling:
    """Return the sampling settings of the flags. Raises UsageError if a value is out of range."""
    names = {field.name for field in fields(Sampling)}
    try:
        return Sampling(**{name: value for name, value in vars(args).items() if name in names})
    except ValueError as error:
        raise UsageError(f"--{error}") from error


def load(args: argparse.Namespace):
    """Return the Decoder and the `lm.storage.weights.Trained` of RUN. Raises UsageError if the
    device or the weights cannot be used."""
    import torch

    from lm.engine.hardware import default_dtype
    from lm.engine.zero_inference import config_of_launch, load_divided
    from lm.inference.decoder import Decoder
    from lm.storage.weights import WeightsFolder, load_trained

    zero = config_of_launch(args.device, args.dtype)  # None without ZeRO-3
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.zeros(0, device=name).device  # raises if the device is not usable
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {name} cannot be used here: {reason}") from error
    trained = load_trained(args.run, partial(load_divided, zero) if zero else WeightsFolder.load)
    if args.run == "auto" or args.run.endswith(BEST):
        say(f"weights: {trained.folder}")
    dtype = getattr(torch, args.dtype or default_dtype(device.type))
    model = trained.model if zero else trained.model.to(device)
    return Decoder(model, dtype, divided=zero is not None), trained


def load_to_talk(args: argparse.Namespace):
    """Call `load` for chat and serve; print a warning if the model has not learned to answer."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UsageError("this program needs one process: start it with python -m, not a launcher")
    decoder, trained = load(args)
    if not (trained.chats or trained.tokenizer.chat_template):
        say("this model was not trained on conversations: it may not answer")
    return decoder, trained
