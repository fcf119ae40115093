"""From prompts to printed continuations, as scripts.generate does it."""

import json
import time
from dataclasses import dataclass
from functools import partial

from common.errors import UsageError
from data.tokenizer import Tokenizer
from inference.decoder import Decoder
from inference.generation import write
from inference.prompts import require_text, say, typed_lines
from inference.sampling import Sampling
from inference.text_stream import StreamedText


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

    def write(self, prompts: list[str]) -> None:
        """Print num_samples continuations of each prompt; say how fast they were written.

        Raises UsageError: a prompt that does not fit into the context.
        """
        asked = [prompt for prompt in prompts for _ in range(self.num_samples)]
        encoded = [self._encode(prompt) for prompt in asked]
        if strange := [prompt for prompt in prompts if self._is_strange(prompt)]:
            say(
                f"{len(strange)} of {len(prompts)} prompts: most characters of {strange[0][:20]!r} "
                "were rare or missing in the text that the tokenizer was made from; the model "
                "hardly knows them"
            )
        n_tokens, started = 0, time.perf_counter()
        for first in range(0, len(asked), self.batch_size):
            batch = slice(first, first + self.batch_size)
            n_tokens += self._write_batch(asked[batch], encoded[batch], first, len(asked))
        seconds = time.perf_counter() - started
        where = f"{str(self.decoder.dtype).removeprefix('torch.')} on {self.decoder.device}"
        say(f"{n_tokens} tokens in {seconds:.2f} s: {n_tokens / seconds:,.0f} tokens/s, {where}")

    def converse(self) -> None:
        """Continue what is typed until the input ends. Ctrl-C stops a continuation.

        Raises UsageError: input that is no text.
        """
        say("A prompt, then Enter. Ctrl-C stops a continuation, Ctrl-D ends.")
        for prompt in typed_lines():
            try:
                self.write([require_text(prompt)])
            except UsageError as error:
                say(str(error))
            except KeyboardInterrupt:
                say("")

    def _encode(self, prompt: str) -> tuple[list[int], list[int]]:
        """As `Tokenizer.encode_prompt`. Raises UsageError: too long where nothing slides."""
        ids, next_ids = self.tokenizer.encode_prompt(prompt)
        context = self.decoder.config.max_seq_len
        if len(ids) > context and not self.slide:
            raise UsageError(
                f"a prompt has {len(ids)} tokens, the context of this model is {context}: shorten "
                "it, or pass --beyond_context slide to go on from its end"
            )
        return ids, next_ids

    def _is_strange(self, prompt: str) -> bool:
        """Whether the tokenizer spells most of the characters in bytes."""
        spelled = map(self.tokenizer.bytes_of, self.tokenizer.encode(prompt))
        # Bytes of 0b10...... go on with a character of UTF-8 that another has begun.
        begun = sum(bool(part) and part[0] >> 6 != 0b10 for part in spelled)
        return 2 * begun > len(prompt)

    def _write_batch(
        self, prompts: list[str], encoded: list[tuple[list[int], list[int]]], first: int, total: int
    ) -> int:
        """Write these continuations together; `first` is the number of the first, of `total`.
        Return how many tokens came."""
        context, most, texts = self.decoder.config.max_seq_len, self.max_new_tokens, []
        printer = Printer(prompts, first, total, self.jsonl)
        for i, (ids, next_ids) in enumerate(encoded):
            text = StreamedText(
                prompt=ids,
                # From a full context the model still predicts one token.
                max_new_tokens=most if self.slide else min(most, context + 1 - len(ids)),
                sampling=self.sampling.numbered(first + i),
                next_ids=next_ids,
                tokenizer=self.tokenizer,
                deliver=partial(printer.add, i),
                stop=self.stop,
            )
            texts.append(text)
        write(self.decoder, texts)
        if cut := sum(t.finish_reason == "length" and t.max_new_tokens < most for t in texts):
            say(
                f"{cut} of {len(texts)} ended with the context of {context} tokens; "
                "--beyond_context slide goes on"
            )
        return sum(len(text.ids) for text in texts)


class Printer:
    """Prints continuations that grow together: the first as it comes, the others after it.

    Args:
        prompts: of the continuations.
        first: number of the first continuation, of `total` in all.
        jsonl: print each continuation when it has ended, as a JSON object in a line.
    """

    def __init__(self, prompts: list[str], first: int, total: int, jsonl: bool):
        self.prompts, self.jsonl = prompts, jsonl
        self.texts = [""] * len(prompts)  # what is not printed yet
        self.ended = [False] * len(prompts)
        self.current = 0  # all before this one are printed
        for i, prompt in enumerate(prompts if not jsonl else ()):
            heading = f"--- {first + i + 1} of {total} ---\n" if total > 1 else ""
            self.texts[i] = heading + prompt
        self._print()

    def add(self, i: int, text: str, finish_reason: str | None) -> None:
        """Take more text of continuation i, which has ended if there is a reason."""
        self.texts[i] += text
        if finish_reason:
            self.ended[i] = True
            if self.jsonl:
                row = {"prompt": self.prompts[i], "text": self.texts[i]}
                self.texts[i] = json.dumps(row, ensure_ascii=False)
            self.texts[i] += "\n"
        self._print()

    def _print(self) -> None:
        while self.current < len(self.texts):
            ended = self.ended[self.current]
            if ended or not self.jsonl:
                print(self.texts[self.current], end="", flush=True)
                self.texts[self.current] = ""
            if not ended:
                return
            self.current += 1
