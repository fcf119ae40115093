"""A server of a tiny model in a process of its own."""

import json
import re
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from conftest import SAFETY_NET_SECONDS, start_warm
from small_model import opinionated

from data.chat_template import TEMPLATE_FILE
from data.tokenizer_training import EOS_ID
from formats.portable import save_portable


def write_model(folder: Path, tokenizer: Path, vocab_size: int, context: int) -> Path:
    """Random weights with a mind of their own, which never end a text by themselves."""
    model = opinionated(vocab_size, context)
    tensors = {name: p.data for name, p in model.named_parameters()}
    tensors["tok_embeddings.weight"][EOS_ID] = 0  # the output's as well: never the likeliest
    folder.mkdir(parents=True)
    save_portable(folder, model.config, tensors)
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


class ServerProcess:
    """Ready to be asked at `url` once it is there.

    Args:
        log: a file for what it prints.
    """

    def __init__(self, weights: Path, log: Path, *flags: str):
        command = [sys.executable, "-m", "scripts.serve", str(weights), "--port", "0", *flags]
        self.log = log
        with log.open("w") as output:
            self.process = start_warm(command, output)
        said = wait_until(lambda: re.search(r" at (http://\S+) ", self.said) or self._failed())
        self.url = said[1]

    def _failed(self) -> None:
        assert self.process.poll() is None, self.said

    @property
    def said(self) -> str:
        return self.log.read_text()

    def load(self) -> dict[str, int]:
        with urllib.request.urlopen(f"{self.url}/health") as response:
            return json.load(response)
