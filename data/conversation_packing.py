"""Turn files of conversations into token shards that tell where the answers are.

They are prepared like text, see data/packing.py. A conversation is stored whole, up to the end of
its last answer: only training knows how long one may be.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from data.chat_template import encode_conversations
from data.conversations import Turn, conversation_records, parse_conversation
from data.corpus import Record, load_json
from data.encoders import Document, Encode, Encoded, loaded, readable
from data.packing import PackingOptions
from data.shards import CONVERSATIONS, token_dtype
from data.tokenizer import open_tokenizer
from data.validation_split import HASHES, hashes

BUILTIN_VAL_FRACTION = 0.1  # some five hundred questions


@dataclass(frozen=True)
class ConversationOptions(PackingOptions):
    """Settings for conversations; `vocab_size` and the settings of text have no effect."""

    kind: ClassVar[str] = CONVERSATIONS
    stage_share: float = 1.0  # of all conversations; the others are for other stages of training

    def share(self, files: list[str]) -> float:
        if self.val_fraction is None and files[0].endswith(".py"):
            return BUILTIN_VAL_FRACTION  # the size of the source does not tell how many there are
        return super().share(files)

    def records(self, files: list[str]) -> Iterator[Record]:
        return conversation_records(files)

    def encoder(self, files: list[str], tokenizer: str) -> Encode:
        return partial(_encode_batch, tokenizer, self.stage_share)

    def settings(self, files: list[str]) -> dict:
        return super().settings(files) | {"kind": self.kind, "stage_share": self.stage_share}


def first_share(text: str) -> float:
    """Return 0.2 of "2,4,4".

    Raises ValueError: not all are numbers, one is below 0, or the first is not above 0.
    """
    shares = [float(part) for part in text.split(",")]
    if min(shares) < 0 or shares[0] <= 0 or not 0 < shares[0] / sum(shares) <= 1:
        raise ValueError(f"{text!r} is not like 2,4,4")
    return shares[0] / sum(shares)


def _encode_batch(path: str, share: float, batch: list[Record]) -> Encoded:
    """Encode the conversations that belong to the first `share` of all."""
    tokenizer = loaded(open_tokenizer, path)
    conversations, bad = readable(batch, _turns)
    chosen = []
    for turns in conversations:
        # Without weights: in every form a conversation has the same hashes. One decides whether it
        # is for validation, the other to which stage of training it belongs.
        said = json.dumps([turn[:2] for turn in turns]).encode()
        where, stage = (number / HASHES for number in hashes(said, 2))
        if stage < share:
            chosen.append((turns, where))
    dtype = token_dtype(tokenizer.vocab_size)
    documents = []
    encoded = encode_conversations(tokenizer, [turns for turns, _ in chosen])
    for (turns, where), (ids, counts) in zip(chosen, encoded, strict=True):
        # The positions at which counting begins or ends. The first id never counts; the last may,
        # where a tokenizer drops line ends.
        answers = np.flatnonzero(np.diff(counts, append=False)).reshape(-1, 2) + 1
        tokens = np.array(ids[: answers[-1, 1]], dtype)
        n_bytes = sum(len(turn.content.encode()) for turn in turns if turn.counts)
        documents.append(Document([tokens], n_bytes, where, answers))
    raw_bytes = sum(len(record.raw) for record in batch)
    return Encoded(documents, bad, raw_bytes, elsewhere=len(conversations) - len(chosen))


def _turns(record: Record) -> list[Turn]:
    return parse_conversation(load_json(record), record.place)
