"""A conversation with a model: what was said, what of it fits into the context, the next answer."""

from dataclasses import dataclass, field, replace

from common.errors import UsageError
from data.chat_template import encode_chat_prompt
from data.conversations import Turn
from data.tokenizer import Tokenizer
from inference.batch import Batch
from inference.continuation import Continuation
from inference.decoder import Decoder
from inference.prompts import require_text
from inference.sampling import Sampling
from inference.text_generator import say

WELCOME = "Enter asks. /reset forgets what was said, Ctrl-C ends an answer, Ctrl-D the program."


@dataclass
class Conversation:
    """What was said so far.

    Where it no longer fits into the context, the oldest questions and their answers are forgotten;
    the system message stays.

    Args:
        context: tokens that the model can see.
        reserve: how many of them are kept free for an answer.
        system: a message to stand before all others; "" for none.
    """

    tokenizer: Tokenizer
    context: int
    reserve: int
    system: str = ""
    turns: list[Turn] = field(default_factory=list)

    def ask(self, question: str) -> tuple[list[int], int]:
        """Ids after which the model is to answer, and how many questions it had to forget. Raises
        UsageError: it does not fit even so; then nothing was asked."""
        asked = [*self.turns, Turn("user", question)]
        before = [Turn("system", self.system)] if self.system else []
        for forgotten in range(0, len(asked), 2):
            ids = encode_chat_prompt(self.tokenizer, before + asked[forgotten:])
            if len(ids) + self.reserve <= self.context:
                self.turns = asked[forgotten:]
                return ids, forgotten // 2
        system = "with the system message " if self.system else ""
        raise UsageError(
            f"this is {len(ids)} tokens {system}and the context of this model has {self.context}, "
            f"of which {self.reserve} are kept for the answer: shorten it"
        )

    def answered(self, answer: str) -> None:
        """Remember the answer; without one the question is forgotten."""
        if answer.strip():
            self.turns.append(Turn("assistant", answer))
        else:
            self.turns.pop()


@dataclass(kw_only=True)
class Chat:
    """A conversation in the terminal: answers go to stdout as they come, all else to stderr."""

    decoder: Decoder
    tokenizer: Tokenizer
    sampling: Sampling  # answer i draws with seed + i
    max_new_tokens: int | None  # of an answer; None for as many as the context has room for
    system: str

    def __post_init__(self):
        self.context = self.decoder.config.max_seq_len
        reserve = min(self.max_new_tokens or self.context, max(1, self.context // 4))
        self.conversation = Conversation(self.tokenizer, self.context, reserve, self.system)
        self.n_answers = 0

    def converse(self) -> None:
        """Until the input ends. Raises UsageError: input that is no text."""
        say(WELCOME)
        while True:
            try:
                question = input("\n> ").strip()
            except EOFError:
                say("")
                return
            except KeyboardInterrupt:
                say("\nCtrl-D ends the program.")
                continue
            except UnicodeDecodeError as error:
                raise UsageError(f"the questions are not valid UTF-8: {error}") from error
            if question == "/reset":
                self.conversation.turns.clear()
                say("Forgotten.")
            elif question:
                try:
                    self.answer(require_text(question))
                except UsageError as error:
                    say(str(error))

    def answer(self, question: str) -> None:
        """Print the answer, up to Ctrl-C. Raises UsageError: the question is too long."""
        prompt, forgotten = self.conversation.ask(question)
        if forgotten:
            say(
                f"(The context of {self.context} tokens is full: from here on the model does not "
                f"see the oldest {2 * forgotten} messages. /reset begins anew.)"
            )
        pieces = []

        def deliver(text: str, finish_reason: str | None) -> None:
            pieces.append(text)
            print(text, end="", flush=True)

        answer = Continuation(
            self.tokenizer,
            prompt,
            replace(self.sampling, seed=(self.sampling.seed + self.n_answers) % 2**63),
            self.context,
            max_new_tokens=self.max_new_tokens,
            deliver=deliver,
        )
        self.n_answers += 1
        try:
            batch = Batch(self.decoder)
            batch.add([answer])
            while batch.texts:
                batch.step()
        except KeyboardInterrupt:
            answer.cancel()
        print(flush=True)
        self.conversation.answered("".join(pieces))
        if answer.finish_reason == "cancelled":
            say("(Stopped.)")
        elif not "".join(pieces).strip():
            say("(The model says nothing to this.)")
        elif answer.finish_reason == "length" and answer.n_tokens != self.max_new_tokens:
            say(f"(The context of {self.context} tokens is full: the answer ends here.)")
