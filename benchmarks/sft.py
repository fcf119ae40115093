"""Compare the speed of this project's full fine-tuning with TRL's `SFTTrainer`, on the same
conversations, weights and cores.

    python -m benchmarks.sft --trl ../trl/bin/python

Each contender is a program as its users start it. It prints a line at the end of each step, and it
is paused while another contender runs. The first pass over the conversations does not count. The
speed is the number of tokens of the conversations, in our template, per second of a pass.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from operator import truediv
from pathlib import Path
from statistics import median

from benchmarks import REPOSITORY
from benchmarks.cli import heading, new_parser, say, spread, table
from benchmarks.contenders import Contender, environments
from benchmarks.sft_trl import WAYS
from common.errors import UsageError, one_line_errors, stop_in_order
from data.chat_template import encode_conversation
from data.conversations import ASSISTANT, SUFFIXES, conversation_records, parse_conversation
from data.corpus import find_files, load_json
from data.tokenizer import Tokenizer
from formats.hugging_face import write_model, write_tokenizer
from model import ConfigError
from storage.find import PRETRAINING, find_run
from storage.weights import load_trained
from training.arguments import SFTArguments

PROGRAM = "benchmarks.sft"
OUT = Path("out/benchmarks/sft")
NOTE = (
    "Values are medians over rounds; in brackets are the lowest and the highest. Ratios are taken "
    "within a round. Tokens are counted without padding. Seconds are for one pass over the data."
)
STEP_ENDED = re.compile(r"step \d+/\d+ +loss ([^\s,]+)")
EVERYBODY = {"PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


@dataclass
class Program:
    """A program that trains and prints a line at the end of each step. It pauses between turns."""

    name: str
    command: list  # words, which `start` turns into strings
    folder: Path  # its working directory
    environment: dict[str, str]
    log: Path  # file for its stderr
    seconds: list[float] = field(default_factory=list)  # of each pass after the first
    loss: str = ""  # of the last step, as the program prints it
    process: subprocess.Popen | None = None

    def start(self) -> None:
        with open(self.log, "wb") as errors:
            self.process = subprocess.Popen(
                list(map(str, self.command)),
                cwd=self.folder,
                env=self.environment | EVERYBODY,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
                start_new_session=True,  # its helpers are paused with it
            )

    def take(self, steps: int) -> float:
        """Let the program take these steps; return the seconds. Raises UsageError if it ended."""
        self._signal(signal.SIGCONT)
        started = time.perf_counter()
        for _ in range(steps):
            self._end_of_step()
        seconds = time.perf_counter() - started
        self._signal(signal.SIGSTOP)
        return seconds

    def _end_of_step(self) -> None:
        for line in self.process.stdout:
            if ended := STEP_ENDED.search(line):
                self.loss = ended[1]
                return
        code = self.process.wait()
        said = " ".join(self.log.read_text(encoding="utf-8", errors="replace").split())
        raise UsageError(f"{self.name} ended with exit code {code}, see {self.log}: {said[-300:]}")

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # the processes have ended
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        """End the program and its helpers."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    with one_line_errors(PROGRAM, UsageError, ConfigError):
        args = parse_options(argv)
        run = find_run(args.run, program=PRETRAINING).resolve()
        trained = load_trained(str(run))
        shutil.rmtree(OUT, ignore_errors=True)
        OUT.mkdir(parents=True)
        number, context = args.steps * args.batch_size, trained.model.config.max_seq_len
        chosen, tokens = choose(args.conversations, trained.tokenizer, number, context)
        (OUT / "conversations.jsonl").write_text(chosen, encoding="utf-8")
        # chat=True exports the chat template with the tokenizer.
        (exported := OUT / "exported").mkdir()
        model, tokenizer = trained.model, trained.tokenizer
        write_model(exported, model, tokenizer, dtype="float32", name="exported", chat=True)
        write_tokenizer(exported, tokenizer, context, chat=True)
        print(f"{heading(PROGRAM, argv)}\n", flush=True)
        racing = programs(args, run, OUT.absolute())
        race(racing, args.steps, args.rounds)
        print(
            f"{number:,} conversations of {tokens / number:.0f} tokens on average, at most "
            f"{context}; {args.batch_size} in a step; {trained.n_parameters / 1e6:.2f} million "
            f"parameters. {NOTE}\n"
        )
        print(table([row(program, racing[0], tokens) for program in racing]))


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(PROGRAM, __doc__)
    add = parser.add_argument
    text = "a Python that has TRL; without it, this project runs alone"
    # Do not resolve links: a virtual environment is found by the path of its Python.
    add("--trl", type=lambda path: Path(path).absolute(), metavar="PYTHON", help=text)
    text = "run with the model and tokenizer; 'auto' is the newest pretraining run"
    add("--run", default="auto", help=text)
    text = "file or folder of conversations, or 'builtin'"
    add("--conversations", metavar="DATA", default="builtin", help=text)
    add("--batch_size", type=int, default=16, help="conversations of a step")
    add("--steps", type=int, default=32, help="steps of a pass over the conversations")
    add("--rounds", type=int, default=3, help="passes that count")
    return parser.parse_args(argv)


def choose(source: str, tokenizer: Tokenizer, number: int, context: int) -> tuple[str, int]:
    """Return `number` conversations that fit into the context, evenly spaced, as JSON lines, and
    their total tokens. Raises DataError if one is bad, UsageError if there are too few."""
    records = conversation_records(find_files(source, SUFFIXES))
    found = [parse_conversation(load_json(record), record.place) for record in records]
    lengths = [len(encode_conversation(tokenizer, turns)[0]) for turns in found]
    pairs = zip(found, lengths, strict=True)
    whole = [pair for pair in pairs if pair[1] <= context and pair[0][-1].role == ASSISTANT]
    if len(whole) < number:
        raise UsageError(
            f"{source}: {len(whole)} conversations end with an answer within {context} tokens, "
            f"{number} are needed: lower --steps or --batch_size"
        )
    chosen = [whole[i * len(whole) // number] for i in range(number)]
    turns = ([{"role": t.role, "content": t.content} for t in each] for each, _ in chosen)
    rows = ({"conversations": each} for each in turns)
    text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in rows)
    return text, sum(length for _, length in chosen)


def programs(args: argparse.Namespace, run: Path, out: Path) -> list[Program]:
    """Return the programs, ours first. Each is told to train one pass more than args.rounds.

    Args:
        run: absolute path of the run with the weights to fine-tune.
        out: absolute path of the folder with conversations.jsonl and with the model in exported/.
    """
    data, exported, passes = out / "conversations.jsonl", out / "exported", args.rounds + 1
    amount = ["--batch_size", args.batch_size, "--epochs", passes, "--log_interval", 1]

    (folder := out / "ours").mkdir()
    command = [sys.executable, "-m", "scripts.prepare_data", "--conversations", data]
    command += ["--tokenizer", run, "--out", out / "packed", "--val_fraction", "0"]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    engine = Contender("ours", compiled=False, engine="zero2")  # as run_accelerate.sh
    words = [sys.executable, REPOSITORY / SFTArguments.program, "--init_from", run]
    words += ["--data", out / "packed", *amount]
    words += ["--log_with", "none", "--compile", "auto", *engine.flags()[-2:]]
    (launched,) = environments(engine)
    found = [Program("this project", words, folder, launched, out / "ours.log")]

    environment = os.environ | {"HF_DATASETS_CACHE": str(out / "datasets")}
    for way in WAYS if args.trl else ():
        words = [args.trl, "-m", "benchmarks.sft_trl", exported, data, out / "trl"]
        words += [args.batch_size, passes, way]
        log = out / f"trl-{len(found)}.log"
        found.append(Program(f"TRL, {way}", words, REPOSITORY, environment, log))
    return found


def race(racing: list[Program], steps: int, rounds: int) -> None:
    """Let each program take a warm-up pass of this many steps, and then `rounds` passes in turns.

    Raises UsageError if a program failed.
    """
    with ExitStack() as started:
        for program in racing:
            program.start()
            started.callback(program.end)
            say(f"{program.name}: first pass after {program.take(steps):.1f} s")
        for number in range(1, rounds + 1):
            for program in racing:
                program.seconds.append(program.take(steps))
            passes = ", ".join(f"{each.name} {each.seconds[-1]:.1f}" for each in racing)
            say(f"round {number}, seconds: {passes}")


def row(program: Program, ours: Program, tokens: int) -> dict[str, str]:
    ratios = list(map(truediv, program.seconds, ours.seconds))  # of each round
    return {
        "": program.name,
        "tokens/s": spread([tokens / seconds for seconds in program.seconds], ",.0f"),
        "how many times as fast ours is": "1" if program is ours else spread(ratios, ".2f"),
        "seconds of a pass": f"{median(program.seconds):.1f}",
        "last loss": program.loss,
    }


if __name__ == "__main__":
    main()
