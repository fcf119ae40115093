"""The decoding loop: a text in a batch has the same tokens as the text alone."""

from dataclasses import replace

import pytest
import torch
from small_model import opinionated

from lm.inference.decoder import Decoder
from lm.inference.generation import Batch, Continuation, generate, generate_all
from lm.inference.sampling import Sampling
from model import Transformer

VOCAB_SIZE = 50
PROMPT = [3, 1, 4, 1, 5]
GREEDY = Sampling(temperature=0)
WILD = Sampling(temperature=2.0, top_k=0, seed=3)


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
    return Continuation(prompt=prompt, max_new_tokens=n, sampling=sampling, **options)


def test_texts_that_join_and_leave_a_batch_are_the_same_as_alone(long):
    lengths, wanted = (30, 5, 50, 1, 64), (12, 40, 3, 25, 30)
    texts = [
        text_of(prompt, n, replace(WILD, seed=seed))
        for seed, (prompt, n) in enumerate(zip(prompts(*lengths), wanted, strict=True))
    ]
    batch = Batch(Decoder(long))
    batch.add(texts[:2])
    for _ in range(7):
        batch.step()
    batch.add(texts[2:4])
    for _ in range(5):
        batch.step()
    assert texts[0].finish_reason == texts[2].finish_reason == "length"
    assert batch.texts == [texts[1], texts[3]]
    batch.add(texts[4:])  # a longer prompt: the cache grows
    while batch.texts:
        batch.step()
    batch.add([again := text_of(*prompts(20), 6)])  # after all texts have left
    while batch.texts:
        batch.step()
    for text in [*texts, again]:
        assert [text.ids] == generate(long, [text.prompt], text.max_new_tokens, text.sampling)
        assert len(text.ids) == text.max_new_tokens


def test_each_text_of_a_batch_has_its_own_settings(long):
    penalised, allowed = replace(GREEDY, repetition_penalty=1.9), list(range(20, 30))
    first, second = prompts(8, 8)
    texts = [
        text_of(first, 15, penalised),
        text_of(second, 15, GREEDY),
        text_of(second, 15, WILD, next_ids=allowed),
        text_of(first, 15, GREEDY),
    ]
    generate_all(Decoder(long), texts)
    for text in texts:
        options = {"next_ids": text.next_ids}
        assert [text.ids] == generate(long, [text.prompt], 15, text.sampling, **options)
    assert texts[0].ids != texts[3].ids
    assert texts[1].ids == step_by_step(long, second, 15)
    assert texts[2].ids[0] in allowed
    assert {*texts[2].ids[1:]} - {*allowed}


def test_a_stop_token_ends_the_text_and_is_not_part_of_it(model):
    (whole,) = generate(model, [PROMPT], 20, WILD)
    stop_id = next(token for token in whole[5:] if token not in PROMPT)
    # A stop token in the prompt has no effect.
    text = text_of(PROMPT, 20, stop_ids=(PROMPT[0], stop_id))
    generate_all(Decoder(model), [text])
    ends = min(whole.index(token) for token in text.stop_ids if token in whole)
    assert text.ids == whole[:ends]
    assert text.finish_reason == "stop"
