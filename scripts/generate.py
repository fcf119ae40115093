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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout

from common.errors import UsageError, one_line_errors
from common.parser import OneLineParser
from inference.prompts import read_prompts
from scripts.model_flags import add_model_flags, add_sampling_flags, load, sampling_of


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m scripts.generate", description=__doc__)
    add = parser.add_argument
    add_model_flags(add)
    add("--prompt", action="append", default=[], help="text to continue; may be given repeatedly")
    one_per_line = "file of prompts, one in a line, or .jsonl with 'prompt' or 'text'; '-' is stdin"
    add("--prompts", help=one_per_line)
    add("--interactive", action="store_true", help="ask for prompts, one after another")
    add("--num_samples", type=int, default=1, help="continuations of each prompt")
    add("--max_new_tokens", type=int, default=100, help="length of a continuation, at most")
    add("--greedy", action="store_true", help="always the likeliest token: --temperature 0")
    add_sampling_flags(add)
    add("--stop", action="append", default=[], help="text that ends a continuation; repeatable")
    add("--seed", type=int, default=42, help="of the samples")
    full = "at the end of the context: stop, or read the later half anew and go on"
    add("--beyond_context", choices=("stop", "slide"), default="stop", help=full)
    add("--jsonl", action="store_true", help="print one JSON object per continuation, when it ends")
    together = "continuations computed together; number i draws with seed + i in any batch"
    add("--batch_size", type=int, default=16, help=together)
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
    from inference.text_generator import TextGenerator

    if args.greedy:
        args.temperature = 0.0
    sampling = sampling_of(args)
    decoder, trained = load(args)
    same = ("max_new_tokens", "num_samples", "batch_size", "jsonl")
    return TextGenerator(
        decoder=decoder,
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
    main()
    if "RANK" in os.environ:
        from training.interruption import leave

        leave()
