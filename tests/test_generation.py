"""A text in a batch has the same tokens as alone. A stream of ids gives whole characters."""

import random
from dataclasses import replace

import pytest
import torch
from json_tokenizers import MARKERS, write_tokenizer
from small_model import opinionated
from test_tokenizer_json import DUMMY_PREFIX, changed

from lm.data.tokenizer import TOKENIZER_FILE, Tokenizer, open_tokenizer
from lm.inference.decoder import Decoder
from lm.inference.generation import Batch, Continuation, StreamedText, generate
from lm.inference.sampling import Sampling
from model import Transformer

VOCAB_SIZE = 50
PROMPT = [3, 1, 4, 1, 5]
GREEDY = Sampling(temperature=0)
WILD = Sampling(temperature=2.0, top_k=0, seed=3)
SUM = "sum 3: 1 + 2 = 3;\n"


@pytest.fixture(scope="module")
def model() -> Transformer:
    return opinionated(VOCAB_SIZE, 12)


@pytest.fixture(scope="module")
def long() -> Transformer:
    return opinionated(VOCAB_SIZE, 150)


def step_by_step(model: Transformer, prompt: list[int], n: int) -> list[int]:
    """Return n tokens, each the likeliest next one. When a sequence is longer than the context,
    only its last context // 2 tokens are kept."""
    tokens, start, context = list(prompt), 0, model.config.max_seq_len
    for _ in range(n):
        if len(tokens) - start > context:
            start = len(tokens) - context // 2
        with torch.no_grad():
            logits = model(torch.tensor([tokens[start:]])).logits[0, -1]
        tokens.append(logits.argmax().item())
    return tokens[len(prompt) :]


# PROMPT has 5 tokens. With n = 7 the text fills the context of 12; with n = 8 it is longer.
@pytest.mark.parametrize("n", [0, 1, 7, 8, 25])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT * 4])
@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}], ids=["plain", "qk_norm"])
def test_greedy_decoding_takes_the_likeliest_token_each_time(changes, prompt, n):
    model = opinionated(VOCAB_SIZE, 12, **changes)
    assert generate(model, [prompt], n, GREEDY) == [step_by_step(model, prompt, n)]


@pytest.mark.parametrize("sampling", [GREEDY, replace(WILD, repetition_penalty=1.2)])
@pytest.mark.parametrize("stop_ids", [(), (7, 11, 13)])
def test_prompts_in_a_batch_get_the_same_texts_as_alone(model, sampling, stop_ids):
    prompts = [PROMPT, [9], PROMPT[::-1], [2] * 12, [8] * 30]
    together = generate(model, prompts, 40, sampling, stop_ids=stop_ids)
    alone = [
        generate(model, [prompt], 40, replace(sampling, seed=sampling.seed + i), stop_ids=stop_ids)
        for i, prompt in enumerate(prompts)
    ]
    assert together == [texts[0] for texts in alone]
    assert len({tuple(text) for text in together}) > 3


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def text_of(prompt: list[int], n: int, sampling: Sampling = WILD, **options) -> Continuation:
    return Continuation(prompt, n, sampling, **options)


def test_texts_that_join_and_leave_a_batch_are_the_same_as_alone(long):
    """Each text has its own settings."""
    wild = [
        text_of(prompt, n, replace(WILD, seed=seed))
        for seed, (prompt, n) in enumerate(zip(prompts(30, 5, 50), (12, 40, 3), strict=True))
    ]
    greedy = text_of(PROMPT, 25, GREEDY)
    penalised = text_of(PROMPT, 15, replace(GREEDY, repetition_penalty=1.9))
    limited = text_of(*prompts(64), 30, next_ids=list(range(20, 30)))
    batch = Batch(Decoder(long))
    batch.add(wild[:2])
    for _ in range(7):
        batch.step()
    batch.add([wild[2], greedy])
    for _ in range(5):
        batch.step()
    assert wild[0].finish_reason == wild[2].finish_reason == "length"
    assert batch.texts == [wild[1], greedy]
    batch.add([limited, penalised])  # a longer prompt: the cache grows
    while batch.texts:
        batch.step()
    batch.add([again := text_of(*prompts(20), 6)])  # after all texts have left
    while batch.texts:
        batch.step()
    for text in [*wild, greedy, penalised, limited, again]:
        how = text.max_new_tokens, text.sampling
        assert [text.ids] == generate(long, [text.prompt], *how, next_ids=text.next_ids)
        assert len(text.ids) == text.max_new_tokens
    assert greedy.ids == step_by_step(long, PROMPT, 25)
    assert penalised.ids != greedy.ids[:15]
    assert limited.ids[0] in limited.next_ids
    assert {*limited.ids[1:]} - {*limited.next_ids}


def write(tokenizer: Tokenizer, ids: list[int], most=None, **options) -> tuple[list[str], str]:
    """Give these ids to a text of `most` tokens (None: as many); return pieces and why it ended."""
    delivered = []
    text = StreamedText(
        prompt=[5],
        max_new_tokens=most or len(ids),
        sampling=Sampling(),
        tokenizer=tokenizer,
        deliver=lambda *piece: delivered.append(piece),
        **options,
    )
    for id in ids:
        text.take(id)
    pieces, reasons = zip(*delivered, strict=True)
    assert "".join(pieces) == text.text
    assert reasons == (None,) * (len(reasons) - 1) + (text.finish_reason,)
    return list(pieces), text.finish_reason


def test_a_character_is_delivered_when_it_is_complete_or_cannot_become_complete(tokenizer):
    ids = tokenizer.encode("🤗!")
    assert write(tokenizer, ids)[0] == ["", "", "", "🤗", "!"]
    broken = tokenizer.decode(ids[:2])
    assert write(tokenizer, ids[:2])[0] == ["", broken]
    pieces, _ = write(tokenizer, [*ids[:2], *tokenizer.encode("sum")])
    assert pieces[2].startswith(broken + "s")


@pytest.mark.parametrize("kind", ["ours", "dummy prefix", *MARKERS])
def test_streaming_random_ids_gives_the_text_of_decoding_them_all(kind, packed, texts, tmp_path):
    """Some characters are incomplete, or have a marker or an id without a piece inside."""
    draw, path = random.Random(0), packed
    if kind in MARKERS:
        path = write_tokenizer(tmp_path, kind, texts)
    elif kind == "dummy prefix":
        path = changed(packed / TOKENIZER_FILE, tmp_path / "t.model", DUMMY_PREFIX)
    tokenizer = open_tokenizer(path)
    prompt = [tokenizer.bos_id, *tokenizer.encode("sum x")]
    for _ in range(300):
        ids = [draw.randrange(tokenizer.vocab_size + 9) for _ in range(30)]
        ids += [draw.randrange(3, 259) for _ in range(20)]  # bytes, mostly no valid characters
        ids = [id for id in ids if id != tokenizer.eos_id]  # it would end the text
        whole = tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]
        assert "".join(write(tokenizer, ids)[0]) == whole


# "sum" is one piece: it holds "u" and "m", and "u" comes first.
STOPS = {("2 = 4", "3;"): "sum 3: 1 + 2 = ", (" = 3", " + "): "sum 3: 1", ("m", "u"): "s"}


@pytest.mark.parametrize(("stop", "expected"), STOPS.items())
def test_a_stop_string_ends_the_text_and_is_not_part_of_it(tokenizer, stop, expected):
    pieces, reason = write(tokenizer, tokenizer.encode(SUM), 99, stop=stop)
    assert ("".join(pieces), reason) == (expected, "stop")


def test_a_text_ends_at_max_new_tokens_or_at_the_end_token(tokenizer):
    ids, eos = tokenizer.encode(SUM), tokenizer.eos_id
    for tokens, reason in ((ids, None), ([*ids, eos, 5], "stop")):
        pieces, ended = write(tokenizer, tokens, len(ids) + 1, stop=("not in the text", ""))
        assert ("".join(pieces), ended) == (SUM, reason)
    assert write(tokenizer, [*ids, 5, 5], len(ids))[1] == "length"


def test_the_beginning_of_a_stop_string_is_held_back_until_it_cannot_continue(tokenizer):
    ids, stop, eos = tokenizer.encode("2 = 3; "), ("3; x",), tokenizer.eos_id
    assert "".join(write(tokenizer, ids, 99, stop=stop)[0]) == "2 = "
    for most, tokens, more in ((99, [*ids, eos], ""), (len(ids), ids, ""), (99, ids * 2, "2 = ")):
        assert "".join(write(tokenizer, tokens, most, stop=stop)[0]) == "2 = 3; " + more


def test_the_space_at_the_end_of_a_prompt_is_not_repeated_and_matches_no_stop_string(tokenizer):
    ids = tokenizer.encode(" 3: 1 3")
    pieces, _ = write(tokenizer, ids, 99, stop=(" 3",), next_ids=tokenizer.ids_with_space)
    assert "".join(pieces) == "3: 1"
