"""Let a trained model continue prompts.

    python -m scripts.generate RUN --prompt "def"
    python -m scripts.generate RUN --prompts prompts.txt --num_samples 3 --greedy
    python -m scripts.generate RUN --interactive
    accelerate launch --config_file configs/zero3_offload.yaml -m scripts.generate RUN --prompt def

The last of these is for a model that is larger than a GPU. The text goes to stdout as it comes,
everything else to stderr.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields

from common.errors import UsageError, one_line_errors
from common.parser import OneLineParser
from inference.prompts import read_prompts


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m scripts.generate", description=__doc__)
    add = parser.add_argument
    runs = "run folder, RUN@best (at its lowest validation), checkpoint or weights; 'auto' is the "
    add("run", metavar="RUN", help=runs + "newest run")
    add("--prompt", action="append", default=[], help="text to continue; may be given repeatedly")
    one_per_line = "file of prompts, one in a line, or .jsonl with 'prompt' or 'text'; '-' is stdin"
    add("--prompts", help=one_per_line)
    add("--interactive", action="store_true", help="ask for prompts, one after another")
    add("--num_samples", type=int, default=1, help="continuations of each prompt")
    add("--max_new_tokens", type=int, default=100, help="length of a continuation, at most")
    add("--greedy", action="store_true", help="always the likeliest token: --temperature 0")
    add("--temperature", type=float, default=0.8, help="below 1 surer, above 1 wilder")
    add("--top_k", type=int, default=50, help="only so many of the likeliest; 0 takes all")
    add("--top_p", type=float, default=1.0, help="only the likeliest with this probability in sum")
    add("--min_p", type=float, default=0.0, help="only those with this share of the likeliest's")
    add("--repetition_penalty", type=float, default=1.0, help="above 1 avoids what was there")
    add("--stop", action="append", default=[], help="text that ends a continuation; repeatable")
    add("--seed", type=int, default=42, help="of the samples")
    full = "at the end of the context: stop, or read the later half anew and go on"
    add("--beyond_context", choices=("stop", "slide"), default="stop", help=full)
    add("--jsonl", action="store_true", help="print one JSON object per continuation, when it ends")
    together = "continuations computed together; number i draws with seed + i in any batch"
    add("--batch_size", type=int, default=16, help=together)
    add("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    dtypes = "of the weights (default: float32 on a CPU, bfloat16 on a GPU)"
    add("--dtype", choices=("float32", "bfloat16"), help=dtypes)
    args = parser.parse_args(argv)
    for name in ("num_samples", "max_new_tokens", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(args, name)}")
    if args.interactive and (args.prompt or args.prompts):
        parser.error("--interactive asks for the prompts itself: leave --prompt and --prompts out")
    return args


def load_generator(args: argparse.Namespace):
    """The TextGenerator that these flags describe.

    Raises UsageError: no such device or run, or a value that cannot work. ConfigError, DataError:
    damaged weights or tokenizer.
    """
    import torch

    from inference.decoder import Decoder
    from inference.sampling import Sampling
    from inference.text_generator import TextGenerator, choose_device, say
    from runs.find import BEST
    from runs.weights import WeightsFolder, load_trained
    from training.engine.zero_inference import ZeroInference

    settings = {field.name: getattr(args, field.name) for field in fields(Sampling)}
    if args.greedy:
        settings["temperature"] = 0.0
    try:
        sampling = Sampling(**settings)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    zero = ZeroInference.of_launch(args.device)
    device = choose_device(args.device)
    trained = load_trained(args.run, zero.load if zero else WeightsFolder.load)
    if args.run == "auto" or args.run.endswith(BEST):
        say(f"weights: {trained.folder}")
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    same = ("max_new_tokens", "num_samples", "batch_size", "jsonl")
    return TextGenerator(
        decoder=zero.decoder(trained.model, dtype)
        if zero
        else Decoder(trained.model.to(device), dtype),
        tokenizer=trained.tokenizer,
        sampling=sampling,
        stop=tuple(args.stop),
        slide=args.beyond_context == "slide",
        **{name: getattr(args, name) for name in same},
    )


@contextmanager
def first_process_speaks() -> Iterator[None]:
    """Under a launcher all processes write the same: the others' text goes nowhere."""
    with ExitStack() as stack:
        if int(os.environ.get("RANK", 0)):
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("generate", UsageError):
        args = parse_arguments(argv)
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 and (args.interactive or args.prompts == "-"):
            raise UsageError(
                "processes cannot share stdin: pass --prompt, or --prompts with a file"
            )
        prompts = [] if args.interactive else read_prompts(args.prompt, args.prompts)
    from model.config import ConfigError  # not above: a mistake in a flag need not wait for torch

    with one_line_errors("generate", UsageError, ConfigError), first_process_speaks():
        generator = load_generator(args)
        if args.interactive:
            generator.converse()
        else:
            generator.write(prompts)


if __name__ == "__main__":
    try:
        main()
        if "RANK" in os.environ:
            from training.interruption import leave

            leave()
    except BrokenPipeError:  # whoever read the text has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
