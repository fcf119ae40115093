"""Encode records of text or conversations as tokens, in several processes.

A small text is stored in several segmentations (docs/data.md). BPE-dropout (Provilkov et al., 2020,
arxiv.org/abs/1910.13267) skips merges of the tokenizer. This module instead splits pieces that the
tokenizer has returned.
"""

import hashlib
import json
import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lm.common.errors import UsageError
from lm.data.conversations import Turn, encode_conversation, parse_conversation
from lm.data.corpus import Record, load_json, parse
from lm.data.shards import TEXT, token_dtype
from lm.data.tokenizer import Tokenizer, open_tokenizer

BATCH_BYTES = 256 * 1024  # text per call of a worker; calls with less text cost too much time
SPLIT_SHARE = 0.1  # share of the divisible pieces that each round splits
# Names under which tokenizers of others know the pieces that begin and end a document or a turn.
MARKERS = re.compile(
    r"</?s>|<[be]os>|<\|(?:im_start|im_end|endoftext|begin_of_text|end_of_text|eot_id)\|>"
)
SPLIT_ROUNDS = 2  # the second round may split the results of the first round again


class Document(NamedTuple):
    """A text, or a conversation up to the end of its last answer that counts."""

    path: str  # of its file
    tokens: list[np.ndarray]  # one array per segmentation, with BOS and EOS
    n_bytes: int  # UTF-8 bytes of a text, or of the answers that count
    number: int  # hash of the text; a document whose hash is small is for validation
    answers: np.ndarray | None = None  # (answers, 2) for a conversation: see `ShardWriter.write`


class Encoded(NamedTuple):
    """The documents of a batch of records."""

    documents: list[Document]
    bad: list[tuple[str, str]]  # file and message of each document that could not be read
    marked: list[str]  # the first marker's name of each record whose text holds one
    unread: list[str]  # keys of conversations that are not read, each once per conversation


@lru_cache(maxsize=1)
def _loaded(path: str) -> Tokenizer:
    # Each process opens the tokenizer once, not for every batch.
    return open_tokenizer(path)


def hash_of(content: bytes, digest_size: int = 8) -> int:
    """Return 64 bits of the BLAKE2b hash. The bits also depend on digest_size."""
    digest = hashlib.blake2b(content, digest_size=digest_size).digest()
    return int.from_bytes(digest[:8], "little")


def encode_batch(
    kind: str, path: str, segmentations: int, markers: bool, batch: list[Record]
) -> Encoded:
    """Encode records of `kind`, text or conversations, with the tokenizer at `path`.
    A text gets `segmentations` segmentations: the tokenizer's own, then random ones. With
    `markers`, names of markers in a text begin and end documents."""
    tokenizer = _loaded(path)
    texts, documents, bad, marked, unread = [], [], [], [], []
    for record in batch:
        try:
            if kind == TEXT:
                text = parse(record)
                texts += [(record, part) for part in documents_in(text, markers) if part]
            else:
                turns, others = parse_conversation(load_json(record), record.place)
                documents.append(_conversation(tokenizer, turns, record))
                unread += others
                text = "\n".join(turn.content for turn in turns)
            marked += MARKERS.findall(text)[:1]
        except UsageError as error:
            bad.append((record.path, str(error)))
    encoded = tokenizer.encode_batch([text for _, text in texts])
    for (record, text), ids in zip(texts, encoded, strict=True):
        if change := tokenizer.change(text, ids):
            bad.append((record.path, f"{record.place}: {change}"))
        else:
            documents.append(_text(record.path, tokenizer, text, ids, segmentations))
    return Encoded(documents, bad, marked, unread)


def documents_in(text: str, markers: bool) -> list[str]:
    """With `markers`, return the texts between the names of markers, without white space around
    them. Otherwise, or if there is no such name, return the text."""
    names_markers = markers and MARKERS.search(text)
    return [part.strip() for part in MARKERS.split(text)] if names_markers else [text]


def _text(
    path: str, tokenizer: Tokenizer, text: str, ids: list[int], segmentations: int
) -> Document:
    dtype = token_dtype(tokenizer.vocab_size)
    # If BOS and EOS are the same piece, the BOS of the next document ends this document.
    end = [tokenizer.eos_id] if tokenizer.eos_id != tokenizer.bos_id else []
    raw = text.encode()
    number = hash_of(raw)
    random = np.random.default_rng(number)  # a text is always split in the same ways
    others = (split_at_random(ids, tokenizer, random) for _ in range(segmentations - 1))
    tokens = [np.array([tokenizer.bos_id, *way, *end], dtype) for way in (ids, *others)]
    return Document(path, tokens, len(raw), number)


@lru_cache(maxsize=1)
def ways_to_split(tokenizer: Tokenizer) -> dict[int, list[tuple[int, int]]]:
    """Map the id of each piece to the pairs of ids that spell the same text."""
    pieces = tokenizer.pieces_of_text
    return {
        id: [
            (pieces[text[:at]], pieces[text[at:]])
            for at in range(1, len(text))
            if text[:at] in pieces and text[at:] in pieces
        ]
        for text, id in pieces.items()
    }


def split_at_random(ids: list[int], tokenizer: Tokenizer, rng: np.random.Generator) -> list[int]:
    """Return ids for the same text. A round splits a divisible piece with chance SPLIT_SHARE."""
    ways_of = ways_to_split(tokenizer)
    for _ in range(SPLIT_ROUNDS):
        found = []
        for id, drawn in zip(ids, rng.random(len(ids)).tolist(), strict=True):
            ways = drawn < SPLIT_SHARE and ways_of.get(id)
            found += ways[int(drawn / SPLIT_SHARE * len(ways))] if ways else (id,)
        ids = found
    return ids


def _conversation(tokenizer: Tokenizer, turns: list[Turn], record: Record) -> Document:
    ids, answers = encode_conversation(tokenizer, turns, record.place)
    tokens = np.array(ids[: answers[-1][1]], token_dtype(tokenizer.vocab_size))
    n_bytes = sum(len(turn.content.encode()) for turn in turns if turn.counts)
    # The hash leaves out `has_weight`, so a conversation has the same hash in every format.
    said = json.dumps([turn[:2] for turn in turns]).encode()
    number = hash_of(said, digest_size=16)
    return Document(record.path, [tokens], n_bytes, number, np.array(answers))


def encode_all(
    records: Iterable[Record], encode: Callable[[list[Record]], Encoded], workers: int, n_bytes: int
) -> Iterator[Encoded]:
    """Yield what `encode`, a partial of `encode_batch`, returns for the batches, in order. If
    `n_bytes` exceeds BATCH_BYTES, `workers` processes encode; they end when this generator is
    closed. Raises UsageError if a process is killed."""
    if n_bytes <= BATCH_BYTES:
        _loaded.cache_clear()  # an earlier tokenizer may have had the same path
        yield from map(encode, _batches(records))
        return
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, spawn, initializer=_start_worker)
    try:
        # New processes inherit SIG_IGN, which protects them until their initializer runs.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for _ in range(workers):  # each call starts a process
            pool.submit(os.getpid)
        signal.signal(signal.SIGINT, handler)
        window = deque()  # pool.map would read the whole corpus into memory
        for batch in _batches(records):
            window.append(pool.submit(encode, batch))
            if len(window) == 3 * workers:
                yield window.popleft().result()
        while window:
            yield window.popleft().result()
    except BrokenProcessPool as error:
        hint = "perhaps memory ran out: try fewer --workers"
        raise UsageError(f"an encoding process was killed, {hint}") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    """Ignore Ctrl-C, which the parent handles, and end when the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: os._exit(parent.join() or 1), daemon=True).start()


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch, size = [], 0
    for record in records:
        batch.append(record)
        size += len(record.raw)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
