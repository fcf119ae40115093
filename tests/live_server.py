"""A tiny model and its web server, which runs in a thread of the test process."""

import threading
from pathlib import Path

from conftest import VOCAB_SIZE
from small_model import opinionated

from lm.data.chat_template import encode_chat_prompt
from lm.data.conversations import Turn
from lm.data.tokenizer import Tokenizer
from lm.data.tokenizer_training import EOS_ID
from lm.inference.decoder import Decoder
from lm.inference.generation import generate
from lm.inference.sampling import Sampling
from lm.inference.server.app import Served, Server, bind
from lm.inference.server.worker import Worker


class LiveServer:
    """A server that answers at `url` until `close` is called. `context` is in tokens."""

    def __init__(self, name: str, tokenizer: Path, context: int, sampling: Sampling | None = None):
        self.tokenizer, self.model = Tokenizer(tokenizer), opinionated(VOCAB_SIZE, context)
        self.model.output.weight.data[EOS_ID] = 0  # EOS gets logit 0, never the highest
        self.worker = Worker(Decoder(self.model), together=16)
        served = Served(
            worker=self.worker,
            tokenizer=self.tokenizer,
            context=context,
            name=name,
            sampling=sampling or Sampling(),
        )
        bound = bind("127.0.0.1", 0)
        self.address = bound.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.server = Server(served)
        self.thread = threading.Thread(target=self.server.run, args=([bound],), daemon=True)
        self.thread.start()

    @property
    def n_running(self) -> int:
        """Count the answers that are being written."""
        return sum(not text.finish_reason for text in self.worker._running)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()

    def continues(self, ids: list[int], n: int, next_ids=(), **sampling) -> str:
        """Return the model's text after these ids, without the server; greedy by default."""
        settings = Sampling(**{"temperature": 0} | sampling)
        (new,) = generate(self.model, [ids], n, settings, next_ids=next_ids)
        return self.tokenizer.decode([*self.tokenizer.encode("x"), *new])[1:]  # as in StreamedText

    def prompt_ids(self, question: str) -> list[int]:
        """Return the ids of a conversation that has only this question."""
        return encode_chat_prompt(self.tokenizer, [Turn("user", question)])
