"""Continue prompts with a trained model. Text goes to stdout, messages to stderr.

    python -m scripts.generate RUN --prompt "def"
    python -m scripts.generate RUN --prompts prompts.txt --num_samples 3 --temperature 0.7

For a model that is larger than a GPU:

    accelerate launch --config_file configs/zero3_offload.yaml -m scripts.generate RUN --prompt def
"""

import os
import sys
from functools import partial

from lm.common.errors import UsageError, one_line_errors
from lm.common.parser import OneLineParser
from lm.common.tasks import join_tasks
from lm.inference.prompts import converse, read_prompts, say
from scripts.model_flags import add_model_flags, at_least_1, load, sampling_of


@one_line_errors("generate", UsageError)
def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m scripts.generate", description=__doc__)
    add = parser.add_argument
    add_model_flags(add)
    add("--prompt", action="append", default=[], help="text to continue; can be repeated")
    add("--prompts", help="file: a prompt per line, or .jsonl with the key 'prompt'; '-': stdin")
    add("--interactive", action="store_true", help="ask for prompts in the terminal")
    add("--num_samples", type=at_least_1, default=1, help="continuations of each prompt")
    add("--max_new_tokens", type=at_least_1, default=100, help="maximum tokens of a continuation")
    text = "always take the most likely token (--temperature 0)"
    add("--greedy", action="store_const", const=0.0, dest="temperature", help=text)
    add("--stop", action="append", default=[], help="text that ends a continuation; repeatable")
    add("--seed", type=int, default=42, help="random seed; continuation i (from 0) uses seed + i")
    add("--jsonl", action="store_true", help="print one JSON object per continuation")
    add("--batch_size", type=at_least_1, default=16, help="continuations computed together")
    args = parser.parse_args(argv)
    join_tasks()
    if args.interactive and (args.prompt or args.prompts):
        parser.error("with --interactive, leave out --prompt and --prompts")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and (args.interactive or args.prompts == "-"):
        parser.error("processes cannot share stdin: pass --prompt, or --prompts with a file")
    sampling = sampling_of(args)
    prompts = [] if args.interactive else read_prompts(args.prompt, args.prompts)
    if int(os.environ.get("RANK", 0)):  # only rank 0 prints
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    decoder, trained = load(args)
    from lm.inference.terminal import write_continuations  # importing torch takes seconds

    write = partial(write_continuations, decoder, trained.tokenizer, sampling, flags=args)
    if args.interactive:
        say("Type a prompt, then Enter. Ctrl-C stops a continuation, Ctrl-D ends.")
        converse(lambda prompt: write(prompts=[prompt]))
    else:
        write(prompts=prompts)


if __name__ == "__main__":
    main()
    if "RANK" in os.environ:
        from lm.engine.engine import exit_rank

        exit_rank()
