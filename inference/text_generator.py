"""From prompts to printed continuations: tokenizer, decoder and sampling together."""

import json
import sys
import time
from dataclasses import dataclass, replace

import torch

from common.errors import UsageError
from data.tokenizer import Tokenizer
from inference.decoder import Decoder
from inference.generation import Generation
from inference.prompts import require_text
from inference.sampling import Sampling
from inference.text_stream import TextStream


@dataclass(kw_only=True)
class TextGenerator:
    """A model with its tokenizer, and how it is to continue prompts."""

    decoder: Decoder
    tokenizer: Tokenizer
    sampling: Sampling  # continuation number i, of all, draws with seed + i
    max_new_tokens: int
    num_samples: int  # continuations of each prompt
    batch_size: int  # continuations computed together
    stop: tuple[str, ...]  # texts that end a continuation
    slide: bool  # at the end of the context: read the later half anew and go on
    jsonl: bool  # print JSON objects

    def encode(self, prompt: str) -> tuple[list[int], list[int]]:
        """As `Tokenizer.encode_prompt`. Raises UsageError: longer than the context, and it is not
        to slide."""
        ids, next_ids = self.tokenizer.encode_prompt(prompt)
        context = self.decoder.config.max_seq_len
        if len(ids) > context and not self.slide:
            raise UsageError(
                f"a prompt has {len(ids)} tokens, the context of this model is {context}: shorten "
                "it, or pass --beyond_context slide to go on from its end"
            )
        return ids, next_ids

    def _is_strange(self, prompt: str) -> bool:
        """Whether the tokenizer has so seldom seen most of the characters that it spells them."""
        spelled = map(self.tokenizer.bytes_of, self.tokenizer.encode(prompt))
        # Bytes of 0b10...... go on with a character of UTF-8 that another has begun.
        begun = sum(bool(part) and part[0] >> 6 != 0b10 for part in spelled)
        return 2 * begun > len(prompt)

    def write(self, prompts: list[str]) -> None:
        """Continue every prompt, num_samples times each, and say how fast that was. Raises
        UsageError: a prompt that does not fit into the context."""
        asked = [prompt for prompt in prompts for _ in range(self.num_samples)]
        encoded = [self.encode(prompt) for prompt in asked]
        if strange := [prompt for prompt in prompts if self._is_strange(prompt)]:
            say(
                f"{len(strange)} of {len(prompts)} prompts: most characters of {strange[0][:20]!r} "
                "were rare or missing in the text that the tokenizer was made from; the model "
                "hardly knows them"
            )
        tokens, started = 0, time.perf_counter()
        for first in range(0, len(asked), self.batch_size):
            batch = slice(first, first + self.batch_size)
            printer = Printer(asked[batch], number=first + 1, total=len(asked), jsonl=self.jsonl)
            tokens += self._write_batch(encoded[batch], first, printer)
        seconds = time.perf_counter() - started
        where = f"{str(self.decoder.dtype).removeprefix('torch.')} on {self.decoder.device}"
        say(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:,.0f} tokens/s, {where}")

    def _write_batch(
        self, encoded: list[tuple[list[int], list[int]]], first: int, printer: "Printer"
    ) -> int:
        """Continue these together; returns how many tokens came."""
        ids, next_ids = zip(*encoded, strict=True)
        generation = Generation(
            self.decoder,
            ids,
            self.max_new_tokens,
            replace(self.sampling, seed=(self.sampling.seed + first) % 2**63),
            next_ids=next_ids,
            stop_ids=(self.tokenizer.eos_id,),
            slide=self.slide,
        )
        streams = [TextStream(self.tokenizer, self.stop, " " if some else "") for some in next_ids]
        for new in generation:
            for i, token in new.items():
                printer.add(i, streams[i].add(token))
                if streams[i].stopped:
                    generation.end(i)
            for i in generation.ended - printer.ended:
                printer.end(i, streams[i].end())
        for i, stream in enumerate(streams):
            printer.end(i, stream.end())
        if generation.cut:
            say(
                f"{len(generation.cut)} of {len(ids)} ended with the context of "
                f"{self.decoder.config.max_seq_len} tokens; --beyond_context slide goes on"
            )
        return sum(map(len, generation.texts)) - sum(map(len, ids))

    def converse(self) -> None:
        """Ask for prompts until the input ends. Ctrl-C ends a continuation, or the conversation.
        Raises UsageError: input that is no text."""
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
                self.write([require_text(prompt)])
            except UsageError as error:
                say(str(error))
            except KeyboardInterrupt:
                say("")


def choose_device(name: str | None) -> torch.device:
    """The device that was named, or the best there is. Raises UsageError: no such device here."""
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
    """What is no continuation."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Printer:
    """Prints continuations that grow together: the first as it comes, the others after it."""

    prompts: list[str]  # of the continuations, in order
    number: int  # of the first one, of `total` in the whole
    total: int
    jsonl: bool  # print whole continuations, each as a JSON object in a line

    def __post_init__(self):
        self.texts = [""] * len(self.prompts)
        self.ended: set[int] = set()
        self.current = 0
        self._begin()

    def add(self, i: int, text: str) -> None:
        """More of continuation i."""
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
