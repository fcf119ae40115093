"""SentencePiece tokenizer: lossless BPE with byte fallback, trained on a sample of the corpus."""

import io
import re
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import sentencepiece

from data.errors import DataError

TOKENIZER_FILE = "tokenizer.model"
UNK_ID, BOS_ID, EOS_ID = 0, 1, 2
RESERVED_PIECES = 3 + 256  # unknown, begin, end of document; one piece per byte
LEAST_VOCABULARY = RESERVED_PIECES + 3
SPACE_SYMBOL = "\u2581"  # SentencePiece writes a space as this character


class Tokenizer:
    """Text to ids and back; decoding what was encoded returns the text exactly. Raises DataError:
    the file is missing or no SentencePiece model with begin and end pieces."""

    def __init__(self, path: str | Path):
        if not Path(path).is_file():
            raise DataError(f"{path}: no such tokenizer file")
        self.path = str(path)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=self.path)
        except (RuntimeError, OSError) as error:
            raise DataError(f"{path}: not a SentencePiece model") from error
        if self._model.bos_id() < 0 or self._model.eos_id() < 0:
            raise DataError(
                f"{path}: has no <s> and </s> pieces to mark where documents begin and end"
            )
        # A literal U+2581 would come back as a space, so it is spelled in bytes where the model
        # can.
        self._space_symbol_ids = [
            self._model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_SYMBOL.encode()
        ]

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size()

    @property
    def bos_id(self) -> int:
        return self._model.bos_id()

    @property
    def eos_id(self) -> int:
        return self._model.eos_id()

    @cached_property
    def ids_with_space(self) -> list[int]:
        """All pieces that begin with a space."""
        pieces = map(self._model.id_to_piece, range(self.vocab_size))
        return [id for id, piece in enumerate(pieces) if piece.startswith(SPACE_SYMBOL)]

    @property
    def pieces_of_text(self) -> dict[str, int]:
        """All pieces that stand for text, with their ids; none for a byte or a marker."""
        model = self._model
        ids = (
            id
            for id in range(self.vocab_size)
            if not (model.is_byte(id) or model.is_control(id) or model.is_unknown(id))
        )
        return {model.id_to_piece(id): id for id in ids}

    def byte_of(self, id: int) -> int | None:
        """The byte that this piece stands for; None for a piece of text or a marker."""
        return int(self._model.id_to_piece(id)[3:5], 16) if self._model.is_byte(id) else None

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without begin and end pieces."""
        return self.encode_batch([text])[0]

    def encode_prompt(self, text: str) -> tuple[list[int], list[int]]:
        """Ids of a text that is to be continued, begin piece included, and the ids that may come
        next, [] for all.

        Words begin with the space before them, and a model has hardly ever seen a word after a
        space that is a piece by itself: one at the end of the text is left to the next piece.
        """
        if text.endswith(" ") and self.ids_with_space:
            return [self.bos_id, *self.encode(text[:-1])], self.ids_with_space
        return [self.bos_id, *self.encode(text)], []

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        batch = self._model.encode(texts)
        for i, text in enumerate(texts):
            if SPACE_SYMBOL in text and self._model.unk_id() not in self._space_symbol_ids:
                first, *others = self._model.encode(text.split(SPACE_SYMBOL))
                batch[i] = first + [
                    id for part in others for id in (*self._space_symbol_ids, *part)
                ]
        return batch

    def decode(self, ids: list[int]) -> str:
        """Text of the ids; bytes that form no UTF-8 character become U+FFFD, markers nothing."""
        return self._model.decode(ids)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, path: str | Path, *, may_shrink: bool = False
) -> None:
    """Train a BPE tokenizer on texts and write it to path.

    At most half of the vocabulary goes to single characters, the commonest; rarer ones (a Chinese
    corpus has ten thousand) are spelled in bytes, so that nothing is ever unknown.

    Args:
        may_shrink: where the texts do not suffice for vocab_size pieces, take as many as they do.

    Raises DataError: vocab_size does not even hold the bytes, or is more than the texts can fill.
    """
    if vocab_size < LEAST_VOCABULARY:
        raise DataError(
            f"vocab_size {vocab_size} is too small, for {RESERVED_PIECES} pieces are bytes and "
            "markers: pass --vocab_size 300 or more"
        )
    texts = list(texts)
    if not any(texts):
        raise DataError("there is no text in these files")
    size = vocab_size
    model = _train(texts, vocab_size)
    while isinstance(model, int) and model >= LEAST_VOCABULARY:
        size = model
        model = _train(texts, model)  # fewer characters get pieces: it may be too many
    if isinstance(model, int):
        raise DataError("too little text to train a tokenizer on")
    if size < vocab_size and not may_shrink:
        raise DataError(
            f"too little text for {vocab_size} pieces: pass --vocab_size {size} or less"
        )
    Path(path).write_bytes(model)


def _train(texts: list[str], vocab_size: int) -> bytes | int:
    """The model, or how many pieces the texts suffice for."""
    counts = Counter()
    for text in texts:
        counts.update(text)
    room = max(1, (vocab_size - RESERVED_PIECES) // 2)
    # SentencePiece reserves NUL for itself, and a literal U+2581 is spelled in bytes (see
    # Tokenizer).
    rare = {ord(char): "\n" for char, _ in counts.most_common()[room:]} | {
        0: "\n",
        ord(SPACE_SYMBOL): "\n",
    }
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(
                line for text in texts for line in text.translate(rare).splitlines(True)
            ),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=1.0,
            required_chars=SPACE_SYMBOL,  # without a piece of its own, a space decodes to U+2581
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=1 << 16,
            unk_id=UNK_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            pad_id=-1,
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        limit = re.search(r"value <= (\d+)", str(error))
        if limit:
            return int(limit[1])
        raise DataError(f"SentencePiece cannot train on this text: {error}") from error
    return model.getvalue()
