"""Talk to a trained model in the terminal.

python -m scripts.chat RUN --system "Answer in one sentence." --temperature 0
"""

import argparse
from contextlib import suppress

from common.errors import UsageError, one_line_errors
from common.parser import OneLineParser
from scripts.model_flags import add_model_flags, at_least_1, load_to_talk, sampling_of


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m scripts.chat", description=__doc__)
    add = parser.add_argument
    add_model_flags(add)
    add("--system", default="", help="a message to stand before all others")
    most = "length of an answer, at most (default: as long as the context has room)"
    add("--max_new_tokens", type=at_least_1, help=most)
    add("--seed", type=int, default=42, help="answer number i draws with seed + i")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("chat", UsageError):
        args = parse_arguments(argv)
        sampling = sampling_of(args)
        decoder, trained = load_to_talk(args)
        from inference.terminal import Chat  # a mistake in a flag need not wait for torch

        chat = Chat(decoder, trained.tokenizer, sampling, args.max_new_tokens, args.system)
        with suppress(ImportError):
            import readline  # noqa: F401  arrow keys in input(), where the system has it
        chat.converse()


if __name__ == "__main__":
    main()
