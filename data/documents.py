"""Turn records of text or of conversations into documents of tokens, a batch at a time."""

import json
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from data.chat_template import encode_conversation
from data.conversations import Turn, parse_conversation
from data.corpus import Record, load_json, parse
from data.errors import DataError
from data.segmentation import split_at_random
from data.shards import TEXT, token_dtype
from data.tokenizer import Tokenizer, open_tokenizer
from data.validation_split import hash_of


class Document(NamedTuple):
    """A text, or a conversation up to the end of its last answer: only training knows how long one
    may be."""

    tokens: list[np.ndarray]  # of each segmentation, with BOS and EOS
    n_bytes: int  # of the text, or of the answers in it
    number: int  # its hash, see `ValidationSplit`
    answers: np.ndarray | None = None  # of a conversation, see `ShardWriter.write`


class Encoded(NamedTuple):
    """The documents of a batch of records."""

    documents: list[Document]
    bad: list[str]  # one message per document that could not be read
    raw_bytes: int


@lru_cache(maxsize=1)
def loaded(path: str) -> Tokenizer:
    """Open a tokenizer once in each process, because that takes longer than encoding a batch."""
    return open_tokenizer(path)


def encode_batch(kind: str, path: str, segmentations: int, batch: list[Record]) -> Encoded:
    """Encode records of this kind of data.

    Args:
        path: of the tokenizer.
        segmentations: ways to cut each text into pieces, all but the first at random.
    """
    tokenizer = loaded(path)
    values, bad = [], []
    for record in batch:
        try:
            if kind == TEXT:
                values.append(parse(record))
            else:
                values.append(parse_conversation(load_json(record), record.place))
        except DataError as error:
            bad.append(str(error))
    if kind == TEXT:
        documents = _texts(tokenizer, [text for text in values if text], segmentations)
    else:
        documents = _conversations(tokenizer, values)
    return Encoded(documents, bad, sum(len(record.raw) for record in batch))


def _texts(tokenizer: Tokenizer, texts: list[str], segmentations: int) -> list[Document]:
    dtype = token_dtype(tokenizer.vocab_size)
    # One marker may do both: then the next document's beginning ends this one.
    end = [tokenizer.eos_id] if tokenizer.eos_id != tokenizer.bos_id else []
    documents = []
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        raw = text.encode()
        number = hash_of(raw)
        random = np.random.default_rng(number)  # the same text is always cut in the same ways
        others = (split_at_random(ids, tokenizer, random) for _ in range(segmentations - 1))
        tokens = [np.array([tokenizer.bos_id, *way, *end], dtype) for way in (ids, *others)]
        documents.append(Document(tokens, len(raw), number))
    return documents


def _conversations(tokenizer: Tokenizer, conversations: list[list[Turn]]) -> list[Document]:
    dtype = token_dtype(tokenizer.vocab_size)
    documents = []
    for turns in conversations:
        ids, counts = encode_conversation(tokenizer, turns)
        # The positions at which counting begins or ends. The first id never counts; the last may,
        # where a tokenizer drops line ends.
        answers = np.flatnonzero(np.diff(counts, append=False)).reshape(-1, 2) + 1
        tokens = np.array(ids[: answers[-1, 1]], dtype)
        n_bytes = sum(len(turn.content.encode()) for turn in turns if turn.counts)
        # Without weights: in every form a conversation has the same hash.
        said = json.dumps([turn[:2] for turn in turns]).encode()
        documents.append(Document([tokens], n_bytes, hash_of(said, digest_size=16), answers))
    return documents
