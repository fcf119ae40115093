"""Let a trained model continue prompts.

    python -m scripts.generate RUN --prompt "def"
    python -m scripts.generate RUN --prompts prompts.txt --num_samples 3 --greedy
    accelerate launch --config_file configs/zero3_offload.yaml -m scripts.generate RUN --prompt def

The last is for a model larger than a GPU. Text goes to stdout, everything else to stderr.
"""

import argparse
import os
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from functools import partial

from common.errors import UsageError, one_line_errors
from common.parser import OneLineParser
from inference.prompts import converse, read_prompts, say
from scripts.model_flags import add_model_flags, at_least_1, load, sampling_of


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m scripts.generate", description=__doc__)
    add = parser.add_argument
    add_model_flags(add)
    add("--prompt", action="append", default=[], help="text to continue; may be given repeatedly")
    add("--prompts", help="file of prompts, one per line, or .jsonl ('prompt', 'text'); '-': stdin")
    add("--interactive", action="store_true", help="ask for prompts, one after another")
    add("--num_samples", type=at_least_1, default=1, help="continuations of each prompt")
    add("--max_new_tokens", type=at_least_1, default=100, help="length of a continuation, at most")
    add("--greedy", action="store_true", help="always the likeliest token: --temperature 0")
    add("--stop", action="append", default=[], help="text that ends a continuation; repeatable")
    add("--seed", type=int, default=42, help="of the samples")
    full = "at the end of the context: stop, or read the later half anew and go on"
    add("--beyond_context", choices=("stop", "slide"), default="stop", help=full)
    add("--jsonl", action="store_true", help="print one JSON object per continuation")
    together = "continuations computed together; number i draws with seed + i in any batch"
    add("--batch_size", type=at_least_1, default=16, help=together)
    args = parser.parse_args(argv)
    if args.interactive and (args.prompt or args.prompts):
        parser.error("--interactive asks for the prompts itself: leave --prompt and --prompts out")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and (args.interactive or args.prompts == "-"):
        parser.error("processes cannot share stdin: pass --prompt, or --prompts with a file")
    if args.greedy:
        args.temperature = 0.0
    return args


def generate(args: argparse.Namespace) -> None:
    sampling = sampling_of(args)
    prompts = [] if args.interactive else read_prompts(args.prompt, args.prompts)
    decoder, trained = load(args)
    from inference.terminal import write_continuations  # a mistake in a flag needs no torch

    write = partial(write_continuations, decoder, trained.tokenizer, sampling, flags=args)
    if args.interactive:
        say("A prompt, then Enter. Ctrl-C stops a continuation, Ctrl-D ends.")
        converse(lambda prompt: write(prompts=[prompt]))
    else:
        write(prompts=prompts)


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("generate", UsageError), ExitStack() as stack:
        args = parse_arguments(argv)
        if int(os.environ.get("RANK", 0)):  # all processes write the same; the first one speaks
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        generate(args)


if __name__ == "__main__":
    main()
    if "RANK" in os.environ:
        from training.interruption import leave

        leave()
