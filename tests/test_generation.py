"""The decoding loop: a text in a batch has the same tokens as the text alone."""

from dataclasses import replace

import pytest
import torch
from small_model import opinionated

from lm.inference.decoder import Decoder
from lm.inference.generation import Batch, Continuation, generate
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
