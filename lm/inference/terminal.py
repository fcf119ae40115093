"""Generation in the terminal: continuations of prompts, and a chat."""

import argparse
import json
import time
from dataclasses import dataclass

from lm.common.errors import UsageError
from lm.data.chat_template import encode_chat_prompt
from lm.data.conversations import Turn
from lm.data.tokenizer import Tokenizer
from lm.inference.decoder import Decoder
from lm.inference.generation import StreamedText, generate_all
from lm.inference.prompts import say
from lm.inference.sampling import Sampling


def write_continuations(
    decoder: Decoder,
    tokenizer: Tokenizer,
    sampling: Sampling,
    prompts: list[str],
    flags: argparse.Namespace,  # of scripts.generate
) -> None:
    """Print continuations of each prompt, and the speed. If every batch has one text, print it
    token by token, except with --jsonl. Raises UsageError if a prompt is too long."""
    repeated = [prompt for prompt in prompts for _ in range(flags.num_samples)]
    context = decoder.config.max_seq_len
    size = min(flags.batch_size, len(repeated))
    streams = size == 1 and not flags.jsonl
    texts = []
    for i, prompt in enumerate(repeated):
        ids, next_ids = tokenizer.encode_prompt(prompt)
        if len(ids) > context:
            sizes = f"a prompt has {len(ids)} tokens, the context has {context}"
            raise UsageError(f"{sizes}: shorten the prompt")
        text = StreamedText(
            prompt=ids,
            max_new_tokens=flags.max_new_tokens,
            sampling=sampling.numbered(i),
            next_ids=next_ids,
            tokenizer=tokenizer,
            deliver=print_piece if streams else lambda *_: None,
            stop=tuple(flags.stop),
        )
        texts.append(text)
    started = time.perf_counter()
    for first in range(0, len(texts), size):
        batch = texts[first : first + size]
        if streams:
            print(_heading(first, repeated), end="", flush=True)
        generate_all(decoder, batch)
        for i, text in enumerate(batch, first):
            if flags.jsonl:
                row = {"prompt": repeated[i], "text": text.text}
                print(json.dumps(row, ensure_ascii=False), flush=True)
            else:
                print("" if streams else _heading(i, repeated) + text.text, flush=True)
    seconds = time.perf_counter() - started
    n_tokens = sum(len(text.ids) for text in texts)
    say(f"{n_tokens} tokens in {seconds:.2f} s: {n_tokens / seconds:,.0f} tokens/s")


def print_piece(text: str, finish_reason: str | None) -> None:
    print(text, end="", flush=True)


def _heading(i: int, prompts: list[str]) -> str:
    number = f"--- {i + 1} of {len(prompts)} ---\n" if len(prompts) > 1 else ""
    return number + prompts[i]


@dataclass
class Chat:
    """A conversation. If the context has too little room, the oldest turns are dropped."""

    decoder: Decoder
    tokenizer: Tokenizer
    sampling: Sampling  # answer i is drawn with seed + i
    max_new_tokens: int | None  # per answer; None: until the context is full
    system: str  # a first message that is never dropped; "" for none

    def __post_init__(self):
        self.context = self.decoder.config.max_seq_len
        self.turns: list[Turn] = []
        self.n_answers = 0

    def ask(self, question: str) -> list[int]:
        """Append a question and return the ids of the prompt. Raises UsageError if the system
        message and the question alone are too long; the conversation is then unchanged."""
        # Keep up to a quarter of the context free for the answer.
        reserve = min(self.max_new_tokens or self.context, max(1, self.context // 4))
        before = [Turn("system", self.system)] if self.system else []
        turns = [*self.turns, Turn("user", question)]
        for dropped in range(0, len(turns), 2):
            ids = encode_chat_prompt(self.tokenizer, before + turns[dropped:])
            if len(ids) + reserve <= self.context:
                break
        else:
            raise UsageError(
                f"the prompt has {len(ids)} tokens, the model's context has {self.context}, and "
                f"{reserve} are kept for the answer: shorten the prompt"
            )
        self.turns = turns[dropped:]
        if dropped:
            say(f"(The context is full: the model now forgets the oldest {dropped} messages.)")
        return ids

    def answer(self, line: str) -> None:
        """Print the answer to a line, or obey /reset. Raises UsageError if the line is too long."""
        if line.strip() == "/reset":
            self.turns.clear()
            say("This is a new chat.")
            return
        prompt = self.ask(line.strip())
        n_free = self.context - len(prompt)
        limit = min(self.max_new_tokens or n_free, n_free)
        how = self.sampling.numbered(self.n_answers)
        answer = StreamedText(prompt, limit, how, tokenizer=self.tokenizer, deliver=print_piece)
        self.n_answers += 1
        try:
            generate_all(self.decoder, [answer])
        except KeyboardInterrupt:
            answer.end()
        print(flush=True)
        if answer.text.strip():
            self.turns.append(Turn("assistant", answer.text))
        else:
            self.turns.pop()
            say("(The answer is empty: the model will not see this question again.)")
        if answer.finish_reason == "length" and len(answer.ids) != self.max_new_tokens:
            say("(The context is full: the answer ends here.)")
