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
        printer = Printer(asked, self.jsonl)
        texts = [self._text(i, prompt, printer) for i, prompt in enumerate(asked)]
        if strange := [prompt for prompt in prompts if self._is_strange(prompt)]:
            say(
                f"{len(strange)} of {len(prompts)} prompts: most characters of {strange[0][:20]!r} "
                "were rare or missing in the text that the tokenizer was made from; the model "
                "hardly knows them"
            )
        started = time.perf_counter()
        printer.print()
        for first in range(0, len(texts), self.batch_size):
            write(self.decoder, texts[first : first + self.batch_size])
        seconds, n_tokens = time.perf_counter() - started, sum(len(text.ids) for text in texts)
        limits = [text.max_new_tokens for text in texts if text.finish_reason == "length"]
        if cut := sum(limit < self.max_new_tokens for limit in limits):
            say(
                f"{cut} of {len(texts)} ended with the context of "
                f"{self.decoder.config.max_seq_len} tokens; --beyond_context slide goes on"
            )
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

    def _text(self, i: int, prompt: str, printer: "Printer") -> StreamedText:
        """Return continuation i. Raises UsageError: the prompt is too long, and nothing slides."""
        ids, next_ids = self.tokenizer.encode_prompt(prompt)
        room, context = self.max_new_tokens, self.decoder.config.max_seq_len
        if not self.slide:
            room = min(room, context + 1 - len(ids))  # a full context predicts one more token
        if room < 1:
            raise UsageError(
                f"a prompt has {len(ids)} tokens, the context of this model is {context}: shorten "
                "it, or pass --beyond_context slide to go on from its end"
            )
        return StreamedText(
            prompt=ids,
            max_new_tokens=room,
            sampling=self.sampling.numbered(i),
            next_ids=next_ids,
            tokenizer=self.tokenizer,
            deliver=partial(printer.add, i),
            stop=self.stop,
        )

    def _is_strange(self, prompt: str) -> bool:
        """Return whether the tokenizer spells most of the characters in bytes."""
        spelled = map(self.tokenizer.bytes_of, self.tokenizer.encode(prompt))
        # Bytes of 0b10...... go on with a character of UTF-8 that another has begun.
        begun = sum(bool(part) and part[0] >> 6 != 0b10 for part in spelled)
        return 2 * begun > len(prompt)


class Printer:
    """Prints continuations that grow together: the first as it comes, the others after it.

    Args:
        prompts: of the continuations.
        jsonl: print each continuation when it has ended, as a JSON object in a line.
    """

    def __init__(self, prompts: list[str], jsonl: bool):
        self.prompts, self.jsonl = prompts, jsonl
        self.texts = [""] * len(prompts)  # what is not printed yet
        self.ended = [False] * len(prompts)
        self.current = 0  # all before this one are printed
        for i, prompt in enumerate(prompts if not jsonl else ()):
            heading = f"--- {i + 1} of {len(prompts)} ---\n" if len(prompts) > 1 else ""
            self.texts[i] = heading + prompt

    def add(self, i: int, text: str, finish_reason: str | None) -> None:
        """Take more text of continuation i, which has ended if there is a reason."""
        self.texts[i] += text
        if finish_reason:
            self.ended[i] = True
            if self.jsonl:
                row = {"prompt": self.prompts[i], "text": self.texts[i]}
                self.texts[i] = json.dumps(row, ensure_ascii=False)
            self.texts[i] += "\n"
        self.print()

    def print(self) -> None:
        """Print what can be printed in order."""
        while self.current < len(self.texts):
            ended = self.ended[self.current]
            if ended or not self.jsonl:
                print(self.texts[self.current], end="", flush=True)
                self.texts[self.current] = ""
            if not ended:
                return
            self.current += 1
