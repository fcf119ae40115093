"""What the programs in which a trained model writes have in common: flags, and the model."""

import argparse
import os
from collections.abc import Callable
from dataclasses import fields

from common.errors import UsageError

NO_CHAT = "these weights have learned from no conversations: they write on where others answer"


def add_model_flags(add: Callable) -> None:
    """
    Args:
        add: a parser's add_argument, as below.
    """
    runs = "run folder, RUN@best (at its lowest validation), checkpoint or weights; 'auto' is the "
    add("run", metavar="RUN", help=runs + "newest run")
    add("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    dtypes = "of the weights (default: float32 on a CPU, bfloat16 on a GPU)"
    add("--dtype", choices=("float32", "bfloat16"), help=dtypes)


def add_sampling_flags(add: Callable) -> None:
    """The fields of `Sampling`, but for the seed."""
    add("--temperature", type=float, default=0.8, help="below 1 surer, above 1 wilder; 0: greedy")
    add("--top_k", type=int, default=50, help="only so many of the likeliest; 0 takes all")
    add("--top_p", type=float, default=1.0, help="only the likeliest with this probability in sum")
    add("--min_p", type=float, default=0.0, help="only those with this share of the likeliest's")
    add("--repetition_penalty", type=float, default=1.0, help="above 1 avoids what was there")


def single(program: str) -> None:
    """Raises UsageError: a launcher has started several processes."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UsageError(f"one process talks: start it as python -m {program}")


def sampling_of(args: argparse.Namespace):
    """The Sampling that the flags describe; seed 0 if there is no flag for it. Raises UsageError:
    a value that cannot work."""
    from inference.sampling import Sampling

    names = {field.name for field in fields(Sampling)}
    try:
        return Sampling(**{name: value for name, value in vars(args).items() if name in names})
    except ValueError as error:
        raise UsageError(f"--{error}") from error


def load(args: argparse.Namespace):
    """The Decoder of the model that the flags name, and the Trained that it is of.

    Raises UsageError: no such device or run. ConfigError, DataError: damaged weights or tokenizer.
    """
    import torch

    from inference.decoder import Decoder
    from inference.text_generator import choose_device, say
    from runs.find import BEST
    from runs.weights import WeightsFolder, load_trained
    from training.engine.zero_inference import ZeroInference

    zero = ZeroInference.of_launch(args.device, args.dtype)
    device = choose_device(args.device)
    trained = load_trained(args.run, zero.load if zero else WeightsFolder.load)
    if args.run == "auto" or args.run.endswith(BEST):
        say(f"weights: {trained.folder}")
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    model = trained.model if zero else trained.model.to(device)
    return Decoder(model, dtype, divided=zero is not None), trained
