"""Two tokenizers: `Tokenizer` reads SentencePiece models, which this project trains;
`JsonTokenizer` reads byte-level BPE, the tokenizer.json of most other models."""

import hashlib
import json
import os
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import decoders, models

from lm.common.errors import UsageError

TOKENIZER_FILE = "tokenizer.model"  # a SentencePiece model
TOKENIZER_JSON = "tokenizer.json"
MARKERS_FILE = "tokenizer_config.json"  # names the pieces that begin and end a document
TOKENIZER_FILES = (TOKENIZER_FILE, TOKENIZER_JSON, MARKERS_FILE)
SPACE_SYMBOL = "\u2581"  # SentencePiece writes a space as this character
# Preparation runs one process per core already. Threads of `tokenizers` do not survive a fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """Encode text with a SentencePiece model, and decode ids to text.
    Raises UsageError if the file is not a model with the pieces <s> and </s>."""

    _space = SPACE_SYMBOL  # how pieces spell a space
    more_end_ids = ()  # tokens of an imported model that end an answer, besides eos_id
    chat_template = None  # a JinjaTemplate of an imported model; None: lm/data/chat_template.py's

    def __init__(self, path: str | Path):
        self.path = str(path)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=self.path)
        except (RuntimeError, OSError) as error:
            raise UsageError(f"{path}: not a SentencePiece model") from error
        self.vocab_size = self._model.vocab_size()
        self.bos_id, self.eos_id = self._model.bos_id(), self._model.eos_id()
        if self.bos_id < 0 or self.eos_id < 0:
            raise UsageError(f"{path}: has no <s> and </s> pieces")
        # A literal U+2581 would be decoded as a space: encode it as byte pieces, if there are any.
        names = [f"<0x{byte:02X}>" for byte in SPACE_SYMBOL.encode()]
        self._space_symbol_ids = [self._model.piece_to_id(name) for name in names]

    @cached_property
    def ids_with_space(self) -> list[int]:
        """Ids of all pieces that begin with a space."""
        pieces = self.pieces_of_text.items()
        return sorted(id for piece, id in pieces if piece.startswith(self._space))

    @property
    def pieces_of_text(self) -> dict[str, int]:
        """Map every piece that stands for text, not for a byte or a marker, to its id."""
        model = self._model
        others = (model.is_byte, model.is_control, model.is_unknown)
        ids = [id for id in range(self.vocab_size) if not any(is_one(id) for is_one in others)]
        return {model.id_to_piece(id): id for id in ids}

    def encode(self, text: str) -> list[int]:
        """Return the ids of the text, without begin and end pieces."""
        return self.encode_batch([text])[0]

    def encode_prompt(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids of the begin piece and of a prompt, and the ids that may come next ([]:
        all). A space at the end is not encoded. The next piece must then begin with a space."""
        if text.endswith(" ") and self.ids_with_space:
            return [self.bos_id, *self.encode(text[:-1])], self.ids_with_space
        return [self.bos_id, *self.encode(text)], []

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, without begin and end pieces."""
        batch = self._model.encode(texts)
        for i, text in enumerate(texts):
            if SPACE_SYMBOL in text and self._model.unk_id() not in self._space_symbol_ids:
                batch[i], *others = self._model.encode(text.split(SPACE_SYMBOL))
                for part in others:
                    batch[i] += [*self._space_symbol_ids, *part]
        return batch

    def decode(self, ids: list[int]) -> str:
        """Return the text of the ids, without markers. Invalid UTF-8 becomes U+FFFD."""
        return self._model.decode([id for id in ids if id < self.vocab_size])

    def change(self, text: str, ids: list[int]) -> str:
        """Describe where the ids of `text` decode to another text; "" if they decode to `text`."""
        decoded = self.decode(ids)
        if decoded == text:
            return ""
        pairs = enumerate(zip_longest(text, decoded))
        start = max(0, next(i for i, (a, b) in pairs if a != b) - 10)
        before, after = text[start : start + 30], decoded[start : start + 30]
        return f"the tokenizer turns {before!r} into {after!r}: pass another --tokenizer"


class JsonTokenizer(Tokenizer):
    """A tokenizer.json with byte-level BPE, as in SmolLM2 or Llama 3, next to a MARKERS_FILE.
    A marker's name in a text is encoded as text. Raises UsageError for another kind of file."""

    _space = "\u0120"

    def __init__(self, path: str | Path):
        self.path = str(path)
        try:
            self._model = tokenizers.Tokenizer.from_file(self.path)
        except Exception as error:  # the package raises no narrower class
            raise UsageError(f"{path}: not a tokenizer.json ({error})") from error
        parts = (type(self._model.model), type(self._model.decoder))
        if parts != (models.BPE, decoders.ByteLevel):
            remedy = "pass --tokenizer FOLDER/tokenizer.model, the SentencePiece file, if any"
            raise UsageError(f"{path}: only byte-level BPE can be read: {remedy}")
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True  # encode the names of markers as text
        markers = read_markers(path)
        self.bos_id, self.eos_id = map(self._model.token_to_id, markers.values())
        if None in (self.bos_id, self.eos_id):
            names = " or ".join(markers.values())
            raise UsageError(f"{path} has no piece {names}, which {MARKERS_FILE} names")
        self.vocab_size = max(self._model.get_vocab().values()) + 1

    @property
    def pieces_of_text(self) -> dict[str, int]:
        """Map every piece that is not an added token, in byte-level BPE's spelling, to its id."""
        added = self._model.get_added_tokens_decoder()
        return {text: id for text, id in self._model.get_vocab().items() if id not in added}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        batch = self._model.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in batch]


def tokenizer_in(path: str | Path) -> Path:
    """Return the path of the tokenizer in a folder, which may be missing. Return another path."""
    path = Path(path)
    if not path.is_dir():
        return path
    has_json = (path / TOKENIZER_JSON).exists() and not (path / TOKENIZER_FILE).exists()
    return path / (TOKENIZER_JSON if has_json else TOKENIZER_FILE)


def open_tokenizer(path: str | Path) -> Tokenizer:
    """Open the tokenizer of a file or folder. Raises UsageError if it cannot be read."""
    path = tokenizer_in(path)
    if not path.is_file():
        raise UsageError(f"{path}: no such tokenizer file")
    return JsonTokenizer(path) if path.suffix == ".json" else Tokenizer(path)


def read_markers(path: str | Path) -> dict[str, str]:
    """Return "bos_token" and "eos_token" of the MARKERS_FILE next to the tokenizer file `path`. If
    bos_token is missing, eos_token takes its place. Raises UsageError if there is no eos_token."""
    beside = Path(path).with_name(MARKERS_FILE)
    try:
        values = json.loads(beside.read_text(encoding="utf-8"))
        named = [values.get(role) for role in ("bos_token", "eos_token")]
        begin, end = (name["content"] if isinstance(name, dict) else name for name in named)
        if not isinstance(end, str) or not isinstance(begin, str | None):
            raise ValueError("no eos_token")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UsageError(f"{beside} names no piece that ends a document ({error})") from error
    return {"bos_token": begin or end, "eos_token": end}


def tokenizer_files(path: str | Path) -> dict[str, bytes]:
    """Return name → content of tokenizer files. Raises UsageError or OSError if one is missing."""
    path = tokenizer_in(path)
    if path.suffix != ".json":
        return {TOKENIZER_FILE: path.read_bytes()}
    markers = json.dumps(read_markers(path), ensure_ascii=False)
    return {TOKENIZER_JSON: path.read_bytes(), MARKERS_FILE: f"{markers}\n".encode()}


def tokenizer_hash(path: str | Path) -> str:
    """Return the SHA-256 of the contents that `tokenizer_files` returns."""
    return hashlib.sha256(b"".join(tokenizer_files(path).values())).hexdigest()


def copy_tokenizer(path: str | Path, folder: Path) -> None:
    for name, content in tokenizer_files(path).items():
        (folder / name).write_bytes(content)
