"""A conversation with a model in the terminal."""

from dataclasses import dataclass

from common.errors import UsageError
from data.chat_template import encode_chat_prompt
from data.conversations import Turn
from data.tokenizer import Tokenizer
from inference.decoder import Decoder
from inference.generation import write
from inference.prompts import converse, say
from inference.sampling import Sampling
from inference.text_generator import print_piece
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
        """Answer until the input ends."""
        say(WELCOME)
        converse(self.answer)

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
            raise UsageError(
                f"this is {len(ids)} tokens and the context of this model has {self.context}, of "
                f"which {reserve} are kept for the answer: shorten it"
            )
        self.turns = turns[forgotten:]
        if forgotten:
            say(f"(The context is full: the model no longer sees the oldest {forgotten} messages.)")
        return ids

    def answer(self, line: str) -> None:
        """Print the answer to what was typed, up to Ctrl-C. Without one the question is forgotten.

        Raises UsageError: the question is too long.
        """
        if line.strip() == "/reset":
            self.turns.clear()
            say("Forgotten.")
            return
        prompt = self.ask(line.strip())
        room = self.context - len(prompt)
        answer = StreamedText(
            prompt=prompt,
            max_new_tokens=min(self.max_new_tokens or room, room),
            sampling=self.sampling.numbered(self.n_answers),
            tokenizer=self.tokenizer,
            deliver=print_piece,
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
            say("(There is no answer: the question is forgotten.)")
        if answer.finish_reason == "length" and answer.n_tokens != self.max_new_tokens:
            say("(The context is full: the answer ends here.)")
