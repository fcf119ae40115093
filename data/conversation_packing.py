"""From files of conversations to token shards in which it is known where the answers are.

They are prepared as text is, see `data/packing.py`; what is different stands here. A conversation
is stored whole, up to the end of its last answer: how long one may be is known to training only.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from data.chat_template import encode_conversations
from data.conversations import ASSISTANT, Turn, conversation_records, parse_conversation
from data.corpus import Record, load_json
from data.encoders import Document, Encoded, loaded
from data.errors import DataError
from data.packing import PackingOptions
from data.shards import CONVERSATIONS, token_dtype
from data.tokenizer import Tokenizer

BUILTIN_VAL_FRACTION = 0.1  # some five hundred questions


@dataclass(frozen=True)
class ConversationOptions(PackingOptions):
    """How conversations are prepared; `vocab_size` and what is about text have no say."""

    kind: ClassVar[str] = CONVERSATIONS
    data_split: tuple[float, ...] = (1,)  # shares of the stages of training, this one's first

    def share(self, files: list[str]) -> float:
        if self.val_fraction is None and files[0].endswith(".py"):
            return BUILTIN_VAL_FRACTION  # the size of the source does not tell how many there are
        return super().share(files)

    def records(self, files: list[str]) -> Iterator[Record]:
        return conversation_records(files)

    def encoder(self, files: list[str], tokenizer: str) -> Callable[[list[Record]], Encoded]:
        return partial(_encode_batch, tokenizer, self.data_split[0] / sum(self.data_split))

    def settings(self, files: list[str]) -> dict:
        return super().settings(files) | {"kind": self.kind, "data_split": list(self.data_split)}


def parse_split(text: str) -> tuple[float, ...]:
    """The shares in "2,4,4", of which only their relation matters. Raises ValueError: anything but
    numbers, the first of them above 0 and the others at least 0."""
    shares = tuple(float(part) for part in text.split(","))
    if not (0 < shares[0] < np.inf and all(0 <= share < np.inf for share in shares)):
        raise ValueError(f"{text!r} is not like 2,4,4")
    return shares


def _encode_batch(path: str, share: float, batch: list[Record]) -> Encoded:
    """What falls into the first `share` of all conversations."""
    tokenizer = loaded(Tokenizer, path)
    conversations, places, bad, elsewhere = [], [], [], 0
    for record in batch:
        try:
            turns = parse_conversation(load_json(record), record.place)
        except DataError as error:
            bad.append(str(error))
            continue
        where, stage = _hashes(turns)
        if stage < share:
            conversations.append(turns)
            places.append(where)
        else:
            elsewhere += 1
    dtype = token_dtype(tokenizer.vocab_size)
    documents = []
    encoded = encode_conversations(tokenizer, conversations)
    for turns, where, (ids, counts) in zip(conversations, places, encoded, strict=True):
        # Where counting begins and ends; it does neither at the first id nor at the last.
        answers = np.flatnonzero(np.diff(counts)).reshape(-1, 2) + 1
        tokens = np.array(ids[: answers[-1, 1]], dtype)
        n_bytes = sum(len(turn.content.encode()) for turn in turns if turn.role == ASSISTANT)
        documents.append(Document([tokens], n_bytes, where, answers))
    return Encoded(documents, bad, sum(len(record.raw) for record in batch), elsewhere)


def _hashes(turns: list[Turn]) -> tuple[float, float]:
    """Two numbers in [0, 1): the same conversation always has the same, whatever form it was in.
    By one it goes to validation or not, by the other to a stage of training."""
    digest = hashlib.blake2b(json.dumps(turns).encode(), digest_size=16).digest()
    return tuple(int.from_bytes(half, "little") / 2**64 for half in (digest[:8], digest[8:]))
