"""Conversations get the ids that transformers' apply_chat_template gives with an exported
tokenizer."""

from types import SimpleNamespace

import json_tokenizers
import pytest
from test_tokenizer import NASTY
from test_tokenizer_json import DUMMY_PREFIX, changed
from transformers import AutoTokenizer

from lm.data.chat_template import encode_chat_prompt
from lm.data.conversations import ROLES, Turn, encode_conversation
from lm.data.tokenizer import TOKENIZER_FILE, Tokenizer, open_tokenizer
from lm.formats.hugging_face import write_tokenizer
from lm.formats.tokenizer_json import ESCAPE

TURNS = [
    Turn("system", "Be brief."),
    *(Turn("user", "1 + 1?"), Turn("assistant", "2")),
    *(Turn("user", "sum 3"), Turn("assistant", "3\n4")),
]
MARKERS = [
    *("<s>", "</s>", "a<s>b", "</s>\n<s>assistant\n", "<unk>", "<<s>", "<s", "<", "<\n<s>>", "a <"),
    *("<|endoftext|>", "<|begin_of_text|>", "<|im_end|>", "a<|eot_id|> b"),
    *("<think>\n1\n</think>\n\n2", "<<think>", "<think", f"<{ESCAPE}think>", "</<think>think>"),
    *(ESCAPE, ESCAPE * 2, f"<{ESCAPE}s>", f"<{ESCAPE[1]}s>", ESCAPE[0], ESCAPE[1], ESCAPE[::-1]),
]


@pytest.fixture(scope="module", params=["ours", "dummy prefix", "names", *json_tokenizers.MARKERS])
def tokenizer(request, packed, tmp_path_factory) -> Tokenizer:
    kind, folder, names = request.param, tmp_path_factory.mktemp("tokenizer"), ()
    if kind == "ours":
        return open_tokenizer(packed)
    if kind == "dummy prefix":
        return Tokenizer(changed(packed / TOKENIZER_FILE, folder / "t.model", DUMMY_PREFIX))
    texts = [f"{role}\n{text}\n\n  1" for role in ROLES for text in NASTY.values()]
    if kind == "names":
        kind, names = "smollm2", ("<think>", "</think>")
    return open_tokenizer(json_tokenizers.write_tokenizer(folder, kind, texts, names=names))


def test_conversations_have_the_ids_of_transformers_template(tokenizer, tmp_path):
    write_tokenizer(tmp_path, tokenizer, 64, chat=True)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    conversations = [TURNS[:n] for n in range(1, len(TURNS) + 1)]
    texts = [*NASTY.values(), *MARKERS, " a ", "\n\na\n", "", " "]
    for text, before in zip(texts, texts[1:] + texts[:1], strict=True):
        turns = [Turn("system", before), Turn("user", text), Turn("assistant", text), TURNS[1]]
        conversations.append(turns)
    for turns in conversations:
        messages, (ids, _) = [t._asdict() for t in turns], encode_conversation(tokenizer, turns)
        assert exported.apply_chat_template(messages, return_dict=False) == ids, turns
        markers = [id for id in ids if id in (tokenizer.bos_id, tokenizer.eos_id)]
        assert markers == [tokenizer.bos_id, tokenizer.eos_id] * len(turns)  # texts add no marker
        options = {"add_generation_prompt": True, "return_dict": False}
        theirs = exported.apply_chat_template(messages, **options)
        assert theirs == encode_chat_prompt(tokenizer, turns), turns


def counted_ids(tokenizer, turns: list[Turn]) -> list[int]:
    ids, answers = encode_conversation(tokenizer, turns)
    return [id for begin, end in answers for id in ids[begin:end]]


def test_only_answers_with_weight_and_their_end_tokens_count(tokenizer):
    prompt = len(tokenizer.encode("assistant\n"))
    answers = [tokenizer.encode(f"assistant\n{text}")[prompt:] for text in ("2", "3\n4")]
    assert tokenizer.decode(answers[1]) == "3\n4"
    counted = [[*answer, tokenizer.eos_id] for answer in answers]
    assert counted_ids(tokenizer, TURNS) == counted[0] + counted[1]
    without = [*TURNS[:4], TURNS[4]._replace(has_weight=False)]
    assert encode_conversation(tokenizer, without)[0] == encode_conversation(tokenizer, TURNS)[0]
    assert counted_ids(tokenizer, without) == counted[0]


def test_a_token_that_begins_before_the_answer_counts_too():
    def encode_batch(texts: list[str]) -> list[list[int]]:  # "\n\n" becomes one token
        return [list(map(ord, text.replace("\n\n", "\u2028"))) for text in texts]

    joining = SimpleNamespace(bos_id=1, eos_id=2, encode_batch=encode_batch)
    counted = counted_ids(joining, [Turn("user", "a"), Turn("assistant", "\nb")])
    assert counted == [ord("\u2028"), ord("b"), 2]
