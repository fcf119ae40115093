"""Let a trained model continue prompts.

    python -m scripts.generate RUN --prompt "def"
    python -m scripts.generate RUN --prompts prompts.txt --num_samples 3 --greedy
    python -m scripts.generate RUN --interactive

The text goes to stdout as it comes, everything else to stderr.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import replace

from common.errors import UsageError, one_line_errors
from common.parser import OneLineParser
from data.errors import DataError
from inference.text_stream import TextStream
from model.config import ConfigError

DTYPES = ("float32", "bfloat16")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m scripts.generate", description=__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="run folder, checkpoint or weights; 'auto' is the newest run")
    add("--prompt", action="append", default=[], help="text to continue; may be given repeatedly")
    add(
        "--prompts",
        help="file of prompts, one in a line, or .jsonl with 'prompt' or 'text'; '-' is stdin",
    )
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
    add(
        "--beyond_context",
        choices=("stop", "slide"),
        default="stop",
        help="at the end of the context: stop, or read the later half anew and go on",
    )
    add("--jsonl", action="store_true", help="print one JSON object per continuation, when it ends")
    add(
        "--batch_size",
        type=int,
        default=16,
        help="continuations computed together; number i draws with seed + i in any batch",
    )
    add("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    add(
        "--dtype",
        choices=DTYPES,
        help="of the weights (default: float32 on a CPU, bfloat16 on a GPU)",
    )
    args = parser.parse_args(argv)
    for name in ("num_samples", "max_new_tokens", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(args, name)}")
    if args.interactive and (args.prompt or args.prompts):
        parser.error("--interactive asks for the prompts itself: leave --prompt and --prompts out")
    return args


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Those of --prompt, then those of --prompts.

    Raises:
        UsageError: none, an empty one, or a file that cannot be read.
    """
    prompts = list(args.prompt)
    if args.prompts:
        try:
            file = sys.stdin.buffer if args.prompts == "-" else open(args.prompts, "rb")  # noqa: SIM115
            with file:
                # Not splitlines, which cuts at form feeds and Unicode's own line separators too.
                lines = file.read().decode("utf-8-sig").replace("\r\n", "\n").split("\n")
            if args.prompts.endswith(".jsonl"):
                prompts += [_prompt_of(line, n) for n, line in enumerate(lines, 1) if line.strip()]
            else:
                prompts += [line for line in lines if line]
        except (OSError, ValueError) as error:
            raise UsageError(f"--prompts {args.prompts}: {error}") from error
        if not prompts:
            raise UsageError(f"--prompts {args.prompts}: there is no prompt in it")
    if not prompts:
        raise UsageError("nothing to continue: give --prompt, --prompts or --interactive")
    return [require_text(prompt) for prompt in prompts]


def require_text(prompt: str) -> str:
    """The prompt itself. Raises UsageError: there is nothing in it, or bytes that are no text."""
    if not prompt:
        raise UsageError("an empty prompt: the model needs something to continue")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the prompt {prompt!r} is not valid UTF-8") from error
    return prompt


def _prompt_of(line: str, number: int) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number} is no JSON") from error
    prompt = row.get("prompt", row.get("text")) if isinstance(row, dict) else None
    if not isinstance(prompt, str):
        raise ValueError(f"line {number} has no 'prompt' and no 'text'")
    return prompt


class Writer:
    """The model with its tokenizer, and how it was asked to write."""

    def __init__(self, args: argparse.Namespace):
        # Loading torch takes a second or two; a mistake in a flag is said without it.
        import torch

        from inference.decoder import Decoder
        from inference.sampling import Sampling
        from runs.weights import load_trained

        try:
            self.sampling = Sampling(
                repetition_penalty=args.repetition_penalty,
                temperature=0.0 if args.greedy else args.temperature,
                top_k=args.top_k,
                top_p=args.top_p,
                min_p=args.min_p,
                seed=args.seed,
            )
        except ValueError as error:
            raise UsageError(f"--{error}") from error
        device = choose_device(args.device)
        trained = load_trained(args.run)
        if args.run == "auto":
            say(f"weights: {trained.folder}")
        name = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
        self.args, self.tokenizer = args, trained.tokenizer
        self.decoder = Decoder(trained.model.to(device), getattr(torch, name))
        self.where = f"{name} on {device}"

    def encode(self, prompt: str) -> list[int]:
        """Raises UsageError: longer than the context, and it is not to slide."""
        ids = [self.tokenizer.bos_id, *self.tokenizer.encode(prompt)]
        context = self.decoder.config.max_seq_len
        if len(ids) > context and self.args.beyond_context == "stop":
            raise UsageError(
                f"a prompt has {len(ids)} tokens, the context of this model is {context}: shorten "
                "it, or pass --beyond_context slide to go on from its end"
            )
        return ids

    def write(self, prompts: list[str]) -> None:
        """Continue every prompt, num_samples times each, and say how fast that was."""
        asked = [prompt for prompt in prompts for _ in range(self.args.num_samples)]
        ids = [self.encode(prompt) for prompt in asked]
        if any(prompt.endswith(" ") for prompt in prompts):
            say("a prompt ends with a space: without it goes better, for words begin with theirs")
        tokens, started = 0, time.perf_counter()
        for first in range(0, len(asked), self.args.batch_size):
            batch = slice(first, first + self.args.batch_size)
            paper = Paper(asked[batch], first + 1, len(asked), self.args.jsonl)
            tokens += self._write_batch(ids[batch], first, paper)
        seconds = time.perf_counter() - started
        say(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:,.0f} tokens/s, {self.where}")

    def _write_batch(self, ids: list[list[int]], first: int, paper: "Paper") -> int:
        """Continue these together; returns how many tokens came."""
        from inference.generation import Generation

        generation = Generation(
            self.decoder,
            ids,
            self.args.max_new_tokens,
            replace(self.sampling, seed=(self.sampling.seed + first) % 2**63),
            stop_ids=(self.tokenizer.eos_id,),
            slide=self.args.beyond_context == "slide",
        )
        streams = [TextStream(self.tokenizer, tuple(self.args.stop)) for _ in ids]
        for new in generation:
            for i, token in new.items():
                paper.add(i, streams[i].add(token))
                if streams[i].stopped:
                    generation.end(i)
            for i in generation.ended - paper.ended:
                paper.end(i, streams[i].end())
        for i, stream in enumerate(streams):
            paper.end(i, stream.end())
        if generation.cut:
            say(
                f"{len(generation.cut)} of {len(ids)} ended with the context of "
                f"{self.decoder.config.max_seq_len} tokens; --beyond_context slide goes on"
            )
        return sum(map(len, generation.texts)) - sum(map(len, ids))


class Paper:
    """Prints continuations that grow together: the first as it comes, the others after it.

    Args:
        prompts: of the continuations, in order.
        number: of the first one, of `total` in the whole.
        jsonl: print whole continuations, each as a JSON object in a line.
    """

    def __init__(self, prompts: list[str], number: int, total: int, jsonl: bool):
        self.prompts, self.number, self.total, self.jsonl = prompts, number, total, jsonl
        self.texts = [""] * len(prompts)
        self.ended: set[int] = set()
        self.current = 0
        self._begin()

    def add(self, i: int, text: str) -> None:
        self.texts[i] += text
        if i == self.current and not self.jsonl:
            print(text, end="", flush=True)

    def end(self, i: int, text: str) -> None:
        """The continuation has ended with this text."""
        if i in self.ended:
            return
        self.add(i, text)
        self.ended.add(i)
        while self.current in self.ended:
            if self.jsonl:
                row = {"prompt": self.prompts[self.current], "text": self.texts[self.current]}
                print(json.dumps(row, ensure_ascii=False), flush=True)
            else:
                print(flush=True)
            self.current += 1
            self._begin()

    def _begin(self) -> None:
        """The heading, if there are several, the prompt, and what has come meanwhile."""
        if self.current == len(self.prompts) or self.jsonl:
            return
        if self.total > 1:
            print(f"--- {self.number + self.current} of {self.total} ---")
        print(self.prompts[self.current] + self.texts[self.current], end="", flush=True)


def choose_device(name: str | None):
    """The torch.device that was named, or the best there is.

    Raises:
        UsageError: no such device here.
    """
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"--device {name} cannot be used here: cpu, cuda or cuda:N can")
    try:
        return torch.zeros(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:80]
        raise UsageError(f"--device {name} cannot be used here: {reason}") from error


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def converse(writer: Writer) -> None:
    """Ask for prompts until the input ends. Ctrl-C ends a continuation, or the conversation."""
    say("A prompt, then Enter. Ctrl-C stops a continuation, Ctrl-D ends.")
    while True:
        try:
            prompt = input("\n> ")
        except (EOFError, KeyboardInterrupt):
            say("")
            return
        except UnicodeDecodeError as error:
            raise UsageError(f"the prompts are not valid UTF-8: {error}") from error
        try:
            writer.write([require_text(prompt)])
        except UsageError as error:
            say(str(error))
        except KeyboardInterrupt:
            say("")


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("generate", UsageError, DataError, ConfigError):
        args = parse_arguments(argv)
        prompts = [] if args.interactive else read_prompts(args)
        writer = Writer(args)
        if args.interactive:
            converse(writer)
        else:
            writer.write(prompts)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # whoever read the text has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
