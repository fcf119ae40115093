"""A conversation with a model in the terminal."""

from dataclasses import dataclass

from common.errors import UsageError
from data.chat_template import encode_chat_prompt
from data.conversations import Turn
from data.tokenizer import Tokenizer
from inference.decoder import Decoder
from inference.generation import write
from inference.prompts import require_text, say, typed_lines
from inference.sampling import Sampling
from inference.text_stream import StreamedText

WELCOME = "Enter asks. /reset forgets what was said, Ctrl-C ends an answer, Ctrl-D the program."


@dataclass(kw_only=True)
class Chat:
    """Answers go to stdout as they come, remarks to stderr.

    Where the conversation no longer fits into the context, the oldest questions and their answers
    are forgotten; the system message stays.
    """

    decoder: Decoder
    tokenizer: Tokenizer
    sampling: Sampling  # answer i draws with seed + i
    max_new_tokens: int | None  # of an answer; None for as many as the context has room for
    system: str  # a message that stands before all others; "" for none

    def __post_init__(self):
        self.context = self.decoder.config.max_seq_len
        self.turns: list[Turn] = []
        self.n_answers = 0

    def converse(self) -> None:
        """Answer until the input ends. Raises UsageError: input that is no text."""
        say(WELCOME)
        for line in typed_lines():
            question = line.strip()
            if question == "/reset":
                self.turns.clear()
                say("Forgotten.")
            elif question:
                try:
                    self.answer(require_text(question))
                except UsageError as error:
                    say(str(error))

    def ask(self, question: str) -> list[int]:
        """Append a question; return the ids after which the model answers.

        Raises UsageError: the question is too long by itself; then nothing is changed.
        """
        reserve = min(self.max_new_tokens or self.context, max(1, self.context // 4))
        before = [Turn("system", self.system)] if self.system else []
        turns = [*self.turns, Turn("user", question)]
        for forgotten in range(0, len(turns), 2):
            ids = encode_chat_prompt(self.tokenizer, before + turns[forgotten:])
            if len(ids) + reserve <= self.context:
                break
        else:
            system = "with the system message " if self.system else ""
            raise UsageError(
                f"this is {len(ids)} tokens {system}and the context of this model has "
                f"{self.context}, of which {reserve} are kept for the answer: shorten it"
            )
        self.turns = turns[forgotten:]
        if forgotten:
            say(
                f"(The context of {self.context} tokens is full: from here on the model does not "
                f"see the oldest {forgotten} messages. /reset begins anew.)"
            )
        return ids

    def answer(self, question: str) -> None:
        """Print the answer, up to Ctrl-C. Without an answer the question is forgotten.

        Raises UsageError: the question is too long.
        """
        prompt = self.ask(question)
        room = self.context - len(prompt)
        answer = StreamedText(
            prompt=prompt,
            max_new_tokens=min(self.max_new_tokens or room, room),
            sampling=self.sampling.numbered(self.n_answers),
            tokenizer=self.tokenizer,
            deliver=lambda text, finish_reason: print(text, end="", flush=True),
        )
        self.n_answers += 1
        try:
            write(self.decoder, [answer])
        except KeyboardInterrupt:
            answer.cancel()
        print(flush=True)
        if answer.text.strip():
            self.turns.append(Turn("assistant", answer.text))
        else:
            self.turns.pop()
        if answer.finish_reason == "cancelled":
            say("(Stopped.)")
        elif not answer.text.strip():
            say("(The model says nothing to this.)")
        elif answer.finish_reason == "length" and answer.n_tokens != self.max_new_tokens:
            say(f"(The context of {self.context} tokens is full: the answer ends here.)")
