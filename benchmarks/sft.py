"""Tokens per second of full fine-tuning: this project beside MiniMind's `train_full_sft.py` and
TRL's `SFTTrainer`, on the same conversations, a model of the same sizes and the same cores.

    python -m benchmarks.sft --minimind ../minimind --trl ../trl/bin/python

Each is a program of its own, as its users start it, that says when a step has ended, and is paused
while it is not its turn. The first pass over the conversations does not count: imports, reading,
whatever compiles. Then they take turns of a pass each. The figure is the tokens of these
conversations in their template, counted once and the same for everybody, by the seconds of such a
pass: padding, and what a program does between two steps, costs whom it costs.

The sizes are those of a run of pretraining, whose weights and tokenizer ours and TRL begin with.
MiniMind begins with random weights, and trains in fp32 on a CPU, whatever its --dtype says.
"""

import argparse
import json
import shutil
import subprocess
import sys
from operator import truediv
from pathlib import Path
from statistics import median

from benchmarks.flags import at_least, new_parser
from benchmarks.markdown import heading, spread, table
from benchmarks.sft_programs import MINIMIND, Program, export, programs, race
from common.errors import UsageError, one_line_errors, stop_in_order
from data.chat_template import encode_conversations
from data.conversations import ASSISTANT, SUFFIXES, conversation_records, parse_conversation
from data.corpus import find_files, load_json
from data.tokenizer import Tokenizer
from model import ConfigError
from runs.find import PRETRAINING, find_run
from runs.weights import load_trained

PROGRAM = "benchmarks.sft"
OUT = Path("out/benchmarks/sft")
NOTE = (
    "Medians over rounds; in brackets the lowest and the highest. Ratios are taken within a round. "
    "Tokens are those of the conversations, padding is none, the same number for everybody; "
    "seconds are of a pass over them, and neither loading nor the first pass counts."
)


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    with one_line_errors(PROGRAM, UsageError, ConfigError):
        args = parse_options(argv)
        versions = require_peers(args)
        run = find_run(args.run, program=PRETRAINING).resolve()
        trained = load_trained(str(run))
        shutil.rmtree(OUT, ignore_errors=True)
        OUT.mkdir(parents=True)
        number, context = args.steps * args.batch_size, trained.model.config.max_seq_len
        chosen, tokens = choose(args.conversations, trained.tokenizer, number, context)
        (OUT / "conversations.jsonl").write_text(chosen, encoding="utf-8")
        export(trained, OUT / "exported")
        print(f"{heading(PROGRAM, argv)}\n\n{versions}.\n", flush=True)
        racing = programs(args, run, OUT.absolute())
        race(racing, args.steps, args.rounds, OUT)
        print(
            f"{number:,} conversations of {tokens / number:.0f} tokens on average, at most "
            f"{context}; {args.batch_size} in a step; {trained.n_parameters / 1e6:.2f} million "
            f"parameters. {NOTE}\n"
        )
        print(table([row(program, racing[0], tokens) for program in racing]))
        print(closing_line(racing))


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("--minimind", type=Path, required=True, help="a checkout of MiniMind")
    text = "a Python that has TRL; MiniMind runs in it too (default: this one, and no TRL)"
    # Not resolved: an environment's Python is known by its path.
    add("--trl", type=lambda path: Path(path).absolute(), metavar="PYTHON", help=text)
    text = "whose sizes, weights and tokenizer; 'auto' is the newest of pretraining"
    add("--run", default="auto", help=text)
    text = "file or folder of conversations, or 'builtin'"
    add("--conversations", metavar="DATA", default="builtin", help=text)
    add("--batch_size", type=at_least(1), default=16, help="conversations of a step")
    add("--steps", type=at_least(1), default=32, help="of a pass, which decide how many there are")
    add("--rounds", type=at_least(1), default=3, help="passes that count")
    return parser.parse_args(argv)


def require_peers(args: argparse.Namespace) -> str:
    """Versions of what the peers run on. Raises UsageError: something of theirs is missing."""
    if not (args.minimind / MINIMIND).is_file():
        raise UsageError(f"{args.minimind} has no {MINIMIND}")
    python = args.trl or sys.executable
    packages = ["torch", "transformers", "datasets", *(["trl"] if args.trl else [])]
    code = "import sys; from importlib.metadata import version as v; "
    code += "print(*(f'{name} {v(name)}' for name in sys.argv[1:]), sep=', ')"
    try:
        words = [python, "-c", code, *packages]
        answer = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        lacks = f"{python} cannot be run, or lacks one of {', '.join(packages)}"
        raise UsageError(f"{lacks}: --trl names a Python that has them") from error
    return f"The peers': {answer.stdout.strip()}"


def choose(source: str, tokenizer: Tokenizer, number: int, context: int) -> tuple[str, int]:
    """So many conversations, spread evenly over those that nobody has to cut, in MiniMind's form,
    and how many tokens they have. Raises DataError: a bad one. UsageError: there are fewer."""
    records = conversation_records(find_files(source, SUFFIXES))
    found = [parse_conversation(load_json(record), record.place) for record in records]
    lengths = [len(ids) for ids, _ in encode_conversations(tokenizer, found)]
    pairs = zip(found, lengths, strict=True)
    whole = [pair for pair in pairs if pair[1] <= context and pair[0][-1].role == ASSISTANT]
    if len(whole) < number:
        raise UsageError(
            f"{source}: {len(whole)} conversations end with an answer within {context} tokens, "
            f"{number} are needed: --steps or --batch_size can be smaller"
        )
    chosen = [whole[i * len(whole) // number] for i in range(number)]
    lists = ([{"role": t.role, "content": t.content} for t in turns] for turns, _ in chosen)
    rows = ({"conversations": turns} for turns in lists)
    text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in rows)
    return text, sum(length for _, length in chosen)


def row(program: Program, ours: Program, tokens: int) -> dict[str, str]:
    ratios = times_as_fast(ours, program)
    return {
        "": program.name,
        "tokens/s": spread([tokens / seconds for seconds in program.seconds], ",.0f"),
        "ours / it": "1" if program is ours else spread(ratios, ".2f"),
        "seconds of a pass": f"{median(program.seconds):.1f}",
        "last loss": program.loss,
    }


def times_as_fast(ours: Program, peer: Program) -> list[float]:
    """In each round."""
    return list(map(truediv, peer.seconds, ours.seconds))


def closing_line(racing: list[Program]) -> str:
    ours, *peers = racing
    ratio, name = min((median(times_as_fast(ours, peer)), peer.name) for peer in peers)
    return f"\n**ours / fastest peer: {ratio:.2f} ({name})**"


if __name__ == "__main__":
    main()
