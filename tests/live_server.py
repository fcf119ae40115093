"""A server of a tiny model in a thread of the tests, and the same model as a folder."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from conftest import SAFETY_NET_SECONDS, VOCAB_SIZE
from small_model import opinionated

from data.chat_template import TEMPLATE_FILE, encode_chat_prompt
from data.conversations import Turn
from data.tokenizer import Tokenizer
from data.tokenizer_training import EOS_ID
from formats.portable import save_portable
from inference.decoder import Decoder
from inference.generation import generate
from inference.sampling import Sampling
from inference.server.app import Served, make_app
from inference.server.listen import Server, bind
from inference.worker import Worker
from model import Transformer

MAX_BYTES = 1 << 16  # of a request


def endless(context: int) -> Transformer:
    """Random weights with a mind of their own, which never end a text by themselves."""
    model = opinionated(VOCAB_SIZE, context)
    model.output.weight.data[EOS_ID] = 0  # never the likeliest
    return model


def write_model(folder: Path, tokenizer: Path, context: int) -> Path:
    """Save such a model as a run's weights."""
    model = endless(context)
    folder.mkdir(parents=True)
    save_portable(folder, model.config, {name: p.data for name, p in model.named_parameters()})
    (folder / "tokenizer.model").write_bytes(tokenizer.read_bytes())
    (folder / TEMPLATE_FILE).touch()
    return folder


def wait_until(condition: Callable):
    """What it gives, as soon as that is true."""
    end = time.monotonic() + SAFETY_NET_SECONDS
    while not (value := condition()):
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)
    return value


class LiveServer:
    """Answers at `url` until it is closed.

    Args:
        name: of the model.
        context: tokens that the model sees.
    """

    def __init__(self, name: str, tokenizer: Path, context: int):
        self.name, self.tokenizer, self.model = name, Tokenizer(tokenizer), endless(context)
        self.worker = Worker(Decoder(self.model), together=16, waiting=64)
        served = Served(
            worker=self.worker,
            tokenizer=self.tokenizer,
            context=context,
            name=name,
            sampling=Sampling(),
            max_bytes=MAX_BYTES,
        )
        bound = bind("127.0.0.1", 0)
        self.address = bound.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.server = Server(make_app(served), self.worker)
        options = {"sockets": [bound]}
        self.thread = threading.Thread(target=self.server.run, kwargs=options, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()

    def continues(self, ids: list[int], n: int, **sampling) -> str:
        """What the model says after these ids, without a server; greedy unless told otherwise."""
        settings = Sampling(**{"temperature": 0} | sampling)
        (new,) = generate(self.model, [ids], n, settings)
        return self.tokenizer.decode([*self.tokenizer.encode("x"), *new])[1:]

    def asked(self, question: str) -> list[int]:
        """The ids that the model reads when this is a conversation's only question."""
        return encode_chat_prompt(self.tokenizer, [Turn("user", question)])
