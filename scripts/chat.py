"""Chat with a trained model in the terminal.

python -m scripts.chat RUN --system "Answer in one sentence." --temperature 0
"""

from contextlib import suppress

from lm.common.errors import UsageError, one_line_errors
from lm.common.parser import OneLineParser
from lm.inference.prompts import converse, say
from scripts.model_flags import add_model_flags, at_least_1, load_to_talk, sampling_of


@one_line_errors("chat", UsageError)
def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m scripts.chat", description=__doc__)
    add = parser.add_argument
    add_model_flags(add)
    add("--system", default="", help="system message at the start of the conversation")
    add("--max_new_tokens", type=at_least_1, help="maximum tokens per answer (default: what fits)")
    add("--seed", type=int, default=42, help="random seed; answer i (from 0) uses seed + i")
    args = parser.parse_args(argv)
    sampling = sampling_of(args)
    decoder, trained = load_to_talk(args)
    from lm.inference.terminal import Chat  # imports torch: only after all flags are checked

    with suppress(ImportError):  # not every system has readline
        import readline  # noqa: F401  arrow keys and history in input()
    say("/reset starts a new chat, Ctrl-C ends an answer, Ctrl-D ends the program.")
    converse(Chat(decoder, trained.tokenizer, sampling, args.max_new_tokens, args.system).answer)


if __name__ == "__main__":
    main()
