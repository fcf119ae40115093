"""A SentencePiece BPE model as tokenizer.json, with equal ids, for the `tokenizers` package.

SentencePiece joins, again and again, the two neighbours whose union has the best score, the
leftmost first; the `tokenizers` package joins the pair of neighbours that stands first in a list.
A list ordered by the score of the union does the same, whatever the order among the pairs that make
one and the same piece: only one of those pairs ever occurs. For as long as no join crosses the two
ends of a stretch of text, what is joined inside it does not depend on its surroundings, so wherever
the stretch becomes a piece, its last two parts are the same.

SentencePiece writes a space as U+2581. Here a space stays a space, in the pieces as in the text: a
literal U+2581 then has no piece and is spelled in bytes, which is what data.tokenizer does.
"""

from pathlib import Path

import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import decoders, models, normalizers, processors

from data.errors import DataError
from data.tokenizer import SPACE_SYMBOL, Tokenizer

Kind = ModelProto.SentencePiece.Type
# The places before which a dummy prefix goes: the beginning of the text, and of each part of it
# between literal U+2581, for data.tokenizer encodes these parts one by one.
PREFIXED = f"(?<![^{SPACE_SYMBOL}])(?=[^{SPACE_SYMBOL}])"


def convert(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer as an object of the `tokenizers` package; its own encode begins with <s>.

    With add_special_tokens=False and encode_special_tokens=True, so that a "<s>" in the text is no
    marker (transformers calls it split_special_tokens), the ids are those of `tokenizer.encode`.
    Decoding them is the same too. Ids that no text encodes to are decoded otherwise where bytes are
    not valid UTF-8: the package writes U+FFFD for each byte of such a run, ours for the wrong ones.

    Raises DataError: the model is of a kind that has no exact equal; names what is not supported.
    """
    model = ModelProto.FromString(Path(tokenizer.path).read_bytes())
    if problem := unsupported(model):
        raise DataError(f"{tokenizer.path}: {problem}: there is no exact tokenizer.json for it")
    vocabulary = {written(piece): id for id, piece in enumerate(model.pieces)}
    scores = {written(p): p.score for p in model.pieces if p.type == Kind.NORMAL}
    unknown = next(p.piece for p in model.pieces if p.type == Kind.UNKNOWN)
    converted = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges(scores), byte_fallback=True, unk_token=unknown)
    )
    before, after = [], [decoders.ByteFallback(), decoders.Fuse()]
    if model.normalizer_spec.add_dummy_prefix:  # as Llama 1 and 2 have it
        before.append(normalizers.Replace(tokenizers.Regex(PREFIXED), " "))
        after.append(decoders.Strip(" ", left=1, right=0))
    if " " not in vocabulary:  # then SentencePiece spells a space in the bytes of its symbol
        before.append(normalizers.Replace(" ", SPACE_SYMBOL))
    converted.normalizer = normalizers.Sequence(before) if before else None
    converted.decoder = decoders.Sequence(after)
    begin = model.pieces[tokenizer.bos_id].piece
    converted.post_processor = processors.TemplateProcessing(
        single=[begin, "$A"],
        pair=[begin, "$A", begin, "$B"],
        special_tokens=[(begin, tokenizer.bos_id)],
    )
    markers = [p.piece for p in model.pieces if p.type in (Kind.CONTROL, Kind.UNKNOWN)]
    converted.add_special_tokens(
        [tokenizers.AddedToken(marker, special=True, normalized=False) for marker in markers]
    )
    return converted


def unsupported(model: ModelProto) -> str | None:
    """What about the model cannot be had in a tokenizer.json, or None."""
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    pieces = {p.piece: p.score for p in model.pieces if p.type == Kind.NORMAL}
    scores = [score for piece, score in pieces.items() if len(piece) > 1]
    kinds = {p.type for p in model.pieces}
    if trainer.model_type != trainer.BPE:
        return f"a {trainer.ModelType.Name(trainer.model_type).lower()} model, not BPE"
    if not trainer.byte_fallback:
        return "without byte fallback, unknown characters are lost"
    if normalizer.precompiled_charsmap or model.denormalizer_spec.precompiled_charsmap:
        return f"it changes characters (normalizer {normalizer.name or 'of its own'})"
    if normalizer.add_dummy_prefix and trainer.treat_whitespace_as_suffix:
        return "it puts a space behind every text (treat_whitespace_as_suffix)"
    if normalizer.remove_extra_whitespaces or not normalizer.escape_whitespaces:
        return "it removes spaces (remove_extra_whitespaces)"
    if Kind.USER_DEFINED in kinds or Kind.UNUSED in kinds:
        return "it has user-defined or unused pieces"
    if len(scores) > len(set(scores)):
        return "two of its pieces have the same score"
    if lone := {char for piece in pieces for char in piece} - set(pieces):
        return f"it has {min(lone)!r} in its pieces, but not as a piece"
    return None


def written(piece: ModelProto.SentencePiece) -> str:
    """The piece with spaces as spaces; markers and bytes under their names."""
    return piece.piece.replace(SPACE_SYMBOL, " ") if piece.type == Kind.NORMAL else piece.piece


def merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Every pair of pieces whose union is a piece, the best union first, from piece → score of the
    ordinary pieces alone, no two unions with the same score."""
    found = []
    for piece in sorted(scores, key=scores.get, reverse=True):
        cuts = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        found += [(left, right) for left, right in cuts if left in scores and right in scores]
    return found
