"""Convert a SentencePiece BPE model to the tokenizer.json of the package `tokenizers`.

SentencePiece repeatedly joins the two neighbours whose union has the best score; of equal scores
it takes the leftmost. `tokenizers` joins the pair that comes first in its list of merges. `merges`
sorts this list by the score of the union, so the ids are equal. The list may have several pairs for
one piece. Every text forms the piece from the same pair: all earlier joins are inside the piece.

SentencePiece writes a space as U+2581. In the tokenizer.json the piece of a space is a space. A
literal U+2581 then has no piece and is spelled in bytes, as in lm/data/tokenizer.py.
"""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto, NormalizerSpec, TrainerSpec
from tokenizers import decoders, models, normalizers, processors

from lm.common.errors import UsageError
from lm.data.chat_template import JINJA_TURN, PLAIN_JINJA
from lm.data.tokenizer import SPACE_SYMBOL, TOKENIZER_FILE, Tokenizer, tokenizer_in
from lm.data.tokenizer_training import NORMALIZER, RESERVED_PIECES, TRAINER

# transformers also looks for markers in a user's text. `exported_jinja` therefore puts these two
# noncharacters into the name of a marker, and the exported tokenizer.json removes them. If a text
# already has such a pair, it gets another pair inside, and only the inner pair is removed.
ESCAPE = "\ufdd0\ufdd1"
Piece = ModelProto.SentencePiece.Type
# The first pieces of every model that lm/data/tokenizer_training.py writes.
RESERVED = {"<unk>": Piece.UNKNOWN, "<s>": Piece.CONTROL, "</s>": Piece.CONTROL}
RESERVED |= {f"<0x{byte:02X}>": Piece.BYTE for byte in range(256)}
# lm/data/tokenizer.py encodes the parts between literal U+2581 one by one, so SentencePiece adds
# its dummy prefix, a space, to each part. This pattern matches the start of each part.
PREFIXED = f"(?<![^{SPACE_SYMBOL}])(?=[^{SPACE_SYMBOL}])"


def convert(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Convert a tokenizer. The result puts <s> before a text.
    With add_special_tokens=False and encode_special_tokens=True (transformers:
    split_special_tokens) it returns the same ids and texts as `tokenizer`, except for invalid
    UTF-8. Raises UsageError if the ids could differ."""
    model = read_exact(tokenizer)
    vocabulary = {written(piece): id for id, piece in enumerate(model.pieces)}
    scores = {written(p): p.score for p in model.pieces if p.type == Piece.NORMAL}
    unknown = next(p.piece for p in model.pieces if p.type == Piece.UNKNOWN)
    converted = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges(scores), byte_fallback=True, unk_token=unknown)
    )
    before = []
    after = [decoders.ByteFallback(), decoders.Fuse()]
    if model.normalizer_spec.add_dummy_prefix:  # in the tokenizers of Llama 1 and 2
        before.append(normalizers.Replace(tokenizers.Regex(PREFIXED), " "))
        after.append(decoders.Strip(" ", left=1, right=0))
    if " " not in vocabulary:  # SentencePiece then spells a space in the bytes of U+2581
        before.append(normalizers.Replace(" ", SPACE_SYMBOL))
    converted.normalizer = normalizers.Sequence(before) if before else None
    converted.decoder = decoders.Sequence(after)
    begin = model.pieces[tokenizer.bos_id].piece
    converted.post_processor = processors.TemplateProcessing(
        single=[begin, "$A"],
        pair=[begin, "$A", begin, "$B"],
        special_tokens=[(begin, tokenizer.bos_id)],
    )
    markers = [p.piece for p in model.pieces if p.type in (Piece.CONTROL, Piece.UNKNOWN)]
    converted.add_special_tokens(
        [tokenizers.AddedToken(marker, special=True, normalized=False) for marker in markers]
    )
    return converted


def restore(tokenizer_json: Path, out: Path) -> bool:
    """Write to `out` the SentencePiece model from which `convert` made a tokenizer.json that other
    programs may have saved again. A model of lm/data/tokenizer_training.py gets its own bytes back.
    Return False, and leave no file, if no model of that kind gives exactly this tokenizer.json."""
    try:
        saved = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    except Exception:  # the package raises no narrower class
        return False
    ids = saved.get_vocab(with_added_tokens=False)
    pieces = sorted(ids, key=ids.get)
    if pieces[:RESERVED_PIECES] != [*RESERVED]:
        return False
    trainer = TrainerSpec(model_type=TrainerSpec.BPE, vocab_size=len(pieces), **TRAINER)
    normalizer = NormalizerSpec(name="identity", precompiled_charsmap=b"", **NORMALIZER)
    model = ModelProto(trainer_spec=trainer, normalizer_spec=normalizer)
    for piece, kind in RESERVED.items():
        model.pieces.add(piece=piece, score=0, type=kind)
    for rank, piece in enumerate(pieces[RESERVED_PIECES:]):
        model.pieces.add(piece=piece.replace(" ", SPACE_SYMBOL), score=-float(rank))
    out.write_bytes(model.SerializeToString())
    saved.no_padding()
    saved.no_truncation()
    with suppress(UsageError):  # SentencePiece or `convert` refuses the model
        converted = convert(Tokenizer(out))
        plain = converted.to_str()
        remove_escapes(converted)
        if saved.to_str() in (plain, converted.to_str()):
            return True
    out.unlink()
    return False


def exported_jinja(markers: Iterable[str]) -> str:
    """Return the chat template of an exported folder. Programs that use the tokenizer.json of the
    folder define pad_token; for other programs, such as llama.cpp, this is PLAIN_JINJA."""
    names = json.dumps([ESCAPE, *markers], ensure_ascii=False)
    escaped = (
        "{% set text = namespace(all=message['role'] + '\\n' + message['content']) %}"
        f"{{% for name in {names} %}}"
        f"{{% set text.all = text.all | replace(name, name[0] + '{ESCAPE}' + name[1:]) %}}"
        "{% endfor %}{{ bos_token + text.all + eos_token + '\\n' }}"
    )
    choice = f"{{% if pad_token is defined %}}{escaped}{{% else %}}{JINJA_TURN}{{% endif %}}"
    return PLAIN_JINJA.replace(JINJA_TURN, choice)


def is_ours(template: str) -> bool:
    """Return True for PLAIN_JINJA, and for its exported forms."""
    plain = re.sub(r"{% if pad_token is def.*?{% else %}(.*?){% endif %}", r"\1", template.strip())
    return plain == PLAIN_JINJA


def remove_escapes(tokenizer: tokenizers.Tokenizer) -> None:
    """Make a tokenizer remove the escapes of `exported_jinja` from a text."""
    old = [tokenizer.normalizer] if tokenizer.normalizer else []
    steps = [normalizers.Replace(ESCAPE, ""), *old]
    tokenizer.normalizer = normalizers.Sequence(steps)


def read_exact(tokenizer: Tokenizer) -> ModelProto:
    """Read a SentencePiece model. Raises UsageError if other programs would give other ids."""
    model = ModelProto.FromString(Path(tokenizer.path).read_bytes())
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    charsmaps = normalizer.precompiled_charsmap, model.denormalizer_spec.precompiled_charsmap
    pieces = {p.piece: p.score for p in model.pieces if p.type == Piece.NORMAL}
    scores = [score for piece, score in pieces.items() if len(piece) > 1]
    types = {p.type for p in model.pieces}
    problems = {
        "is not BPE": trainer.model_type != trainer.BPE,
        "has no pieces for bytes": not trainer.byte_fallback,
        "changes characters": any(charsmaps),
        "puts a space after a text": trainer.treat_whitespace_as_suffix,
        "removes spaces": normalizer.remove_extra_whitespaces,
        "keeps spaces as they are": not normalizer.escape_whitespaces,
        "has user-defined or unused pieces": types & {Piece.USER_DEFINED, Piece.UNUSED},
        "has two pieces of the same score": len(scores) > len(set(scores)),
        "has a character that is no piece": {c for piece in pieces for c in piece} - set(pieces),
    }
    if found := [problem for problem, is_there in problems.items() if is_there]:
        hint = "ids would differ in other programs (export_hf --no-tokenizer exports only weights)"
        raise UsageError(f"{tokenizer.path} {found[0]}: {hint}")
    return model


def export_warning(folder: str | Path) -> str:
    """Say which exports will refuse the tokenizer of a data folder, and why; otherwise ""."""
    path = tokenizer_in(folder)
    try:
        if path.name == TOKENIZER_FILE and path.is_file():
            read_exact(Tokenizer(path))
    except UsageError as error:
        return f"WARNING: export_hf and export_gguf will refuse the tokenizer: {error}"
    return ""


def written(piece: ModelProto.SentencePiece) -> str:
    """Return the spelling of a piece in tokenizer.json: pieces of text have spaces for U+2581."""
    return piece.piece.replace(SPACE_SYMBOL, " ") if piece.type == Piece.NORMAL else piece.piece


def merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """List the pairs of pieces whose union is a piece, best score first."""
    found = []
    for piece in sorted(scores, key=scores.get, reverse=True):
        cuts = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        found += [(left, right) for left, right in cuts if left in scores and right in scores]
    return found
