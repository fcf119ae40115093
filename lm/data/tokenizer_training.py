"""Train a SentencePiece BPE tokenizer. Decoding the ids of a text returns exactly that text."""

import io
import re
from collections import Counter
from itertools import chain
from pathlib import Path

import sentencepiece

from lm.common.errors import UsageError
from lm.data.tokenizer import SPACE_SYMBOL

UNK_ID, BOS_ID, EOS_ID = 0, 1, 2
RESERVED_PIECES = 3 + 256  # <unk>, <s>, </s>, and one piece per byte
LEAST_VOCABULARY = RESERVED_PIECES + 3
# SentencePiece drops longer lines without a message, so they are cut.
LONGEST_LINE = 1 << 14  # characters, each of at most four bytes
# Settings of SentencePiece. lm/formats/tokenizer_json.py writes them into a restored model.
TRAINER = {
    "character_coverage": 1.0,
    "required_chars": SPACE_SYMBOL,  # it stands for a space; decoding needs this piece
    "byte_fallback": True,
    "allow_whitespace_only_pieces": True,
    "max_sentence_length": 4 * LONGEST_LINE,
    **{"unk_id": UNK_ID, "bos_id": BOS_ID, "eos_id": EOS_ID, "pad_id": -1},
}
NORMALIZER = {"add_dummy_prefix": False, "remove_extra_whitespaces": False}


def train_tokenizer(
    texts: list[str], vocab_size: int, path: str | Path, *, may_shrink: bool = False
) -> None:
    """Train a BPE tokenizer on texts and write it to `path`. Besides RESERVED_PIECES and the
    space, at most half of the pieces are single characters. Rarer characters are spelled in bytes.
    With may_shrink, short texts get fewer pieces. Raises UsageError if vocab_size cannot be met."""
    if not any(texts):
        raise UsageError("there is no text in these files")
    size = vocab_size
    while size >= LEAST_VOCABULARY and isinstance(model := _train(texts, size), int):
        size = model  # repeat: now fewer characters become pieces, so the limit may fall again
    if size < LEAST_VOCABULARY:
        wrong = f"vocab_size {vocab_size} is too small, or there is too little text"
        raise UsageError(f"{wrong}: pass --vocab_size 300 or more, or more text")
    if size < vocab_size and not may_shrink:
        raise UsageError(f"too little text for {vocab_size} pieces: pass --vocab_size {size}")
    Path(path).write_bytes(model)


def _train(texts: list[str], vocab_size: int) -> bytes | int:
    """Return the model; if the texts are too short, return a smaller vocab_size to try."""
    counts = Counter(chain.from_iterable(texts))
    n_chars = max(1, (vocab_size - RESERVED_PIECES) // 2)
    rare = [char for char, _ in counts.most_common()[n_chars:]]
    # Cut lines at rare characters and at two characters that SentencePiece reserves.
    cuts = str.maketrans(dict.fromkeys([*rare, "\0", SPACE_SYMBOL], "\n"))
    lines = (
        line[start : start + LONGEST_LINE]
        for text in texts
        for line in text.translate(cuts).splitlines(True)
        for start in range(0, len(line), LONGEST_LINE)
    )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            normalization_rule_name="identity",
            minloglevel=2,
            **TRAINER,
            **NORMALIZER,
        )
    except (RuntimeError, ValueError) as error:
        if limit := re.search(r"value <= (\d+)", str(error)):
            return int(limit[1])
        raise UsageError(f"SentencePiece cannot train on this text: {error}") from error
    return model.getvalue()
