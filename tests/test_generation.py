import pytest
import torch

from inference.decoder import Decoder
from inference.generation import Generation, generate
from inference.sampling import Sampling
from model import LMConfig, Transformer

PROMPT = [3, 1, 4, 1, 5]
GREEDY = Sampling(temperature=0)


def transformer(vocab_size=30, **changes) -> Transformer:
    """Small, untrained, and sure enough of its next token to tell tokens apart."""
    torch.manual_seed(0)
    shape = {"dim": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 12, "tie_embeddings": False}
    model = Transformer(LMConfig(vocab_size=vocab_size, **shape | changes)).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.mul_(20)
    return model


def step_by_step(model: Transformer, prompt: list[int], n: int) -> list[int]:
    """The likeliest next token, n times; a sequence over the context keeps its later half."""
    tokens, start, context = list(prompt), 0, model.config.max_seq_len
    for _ in range(n):
        if len(tokens) - start > context:
            start = len(tokens) - context // 2
        with torch.no_grad():
            logits = model(torch.tensor([tokens[start:]])).logits[0, -1]
        tokens.append(logits.argmax().item())
    return tokens[len(prompt) :]


@pytest.mark.parametrize("n", [0, 1, 6, 7, 8, 25])  # beyond the context of 12 from 8 on
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT * 4])
def test_greedy_is_the_likeliest_token_each_time(prompt, n):
    model = transformer()
    expected = step_by_step(model, prompt, n)
    assert len(expected) == n
    assert n < 25 or len(set(expected)) > 3
    assert generate(model, [prompt], n, GREEDY) == [expected]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=2.0, repetition_penalty=1.2)])
@pytest.mark.parametrize("stop_ids", [(), (7, 11, 13)])
def test_prompts_together_give_what_each_gives_alone(sampling, stop_ids):
    model = transformer()
    prompts = [PROMPT, [9], PROMPT[::-1], [2] * 12, [8] * 30]
    together = generate(model, prompts, 40, sampling, stop_ids=stop_ids)
    alone = [
        generate(model, [prompt], 40, Sampling(**vars(sampling) | {"seed": i}), stop_ids=stop_ids)
        for i, prompt in enumerate(prompts)
    ]
    assert together == [texts[0] for texts in alone]
    assert len({tuple(text) for text in together}) > 1


def test_iterating_gives_every_token_when_it_comes():
    model = transformer()
    generation = Generation(model, [PROMPT, [9]], 20, Sampling(seed=3), slide=True)
    collected = {0: [], 1: []}
    for n, new in enumerate(generation, 1):
        for index, token in new.items():
            collected[index].append(token)
        assert all(len(tokens) == n for tokens in collected.values())
    assert n == 20
    assert generate(model, [PROMPT, [9]], 20, Sampling(seed=3)) == list(collected.values())


def test_a_prompt_that_is_ended_from_outside_grows_no_further_and_the_others_do():
    model = transformer()
    whole = generate(model, [PROMPT, [9]], 20, Sampling(seed=3))
    generation = Generation(model, [PROMPT, [9]], 20, Sampling(seed=3), slide=True)
    for n, _ in enumerate(generation, 1):
        if n == 4:
            generation.end(0)
    grown = [generation.texts[0][5:], generation.texts[1][1:]]
    assert grown == [whole[0][:4], whole[1]]


def test_without_sliding_the_text_ends_with_the_context_and_says_so():
    model = transformer()
    generation = Generation(model, [PROMPT, [9] * 12, [9]], 10, GREEDY)
    for _ in generation:
        pass
    # a context of 12 sees 12 tokens and predicts a thirteenth
    assert [len(text) for text in generation.texts] == [13, 13, 11]
    assert generation.cut == {0, 1}


def test_a_prompt_longer_than_the_context_is_refused_without_sliding():
    with pytest.raises(ValueError, match="13 tokens, but the context has 12"):
        Generation(transformer(), [[1] * 13], 5)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=2.0, top_k=3, seed=4)])
def test_the_first_token_is_one_of_those_that_are_given_and_the_others_are_free(sampling):
    model = transformer()
    free = generate(model, [PROMPT, [9]], 6, sampling)
    allowed = [id for id in range(30) if id not in free[1][:1]][:5]
    texts = generate(model, [PROMPT, [9]], 6, sampling, next_ids=[[], allowed])
    assert texts[0] == free[0]
    assert texts[1][0] in allowed
    assert {*texts[1][1:]} - {*allowed}


def test_the_same_seed_gives_the_same_text_and_another_seed_another():
    decoder = Decoder(transformer())
    texts = [generate(decoder, [PROMPT], 20, Sampling(temperature=2.0, seed=s)) for s in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


def test_the_stop_token_ends_the_text_and_is_not_part_of_it():
    model = transformer()
    sampling = Sampling(temperature=2.0, seed=1)
    (text,) = generate(model, [PROMPT], 20, sampling)
    stop_id = text[7]
    (stopped,) = generate(model, [PROMPT], 20, sampling, stop_ids=(stop_id,))
    assert stopped == text[: text.index(stop_id)]


def test_a_stop_token_in_the_prompt_does_not_stop():
    model = transformer()
    (text,) = generate(model, [PROMPT], 3, GREEDY)
    in_prompt_alone = next(token for token in PROMPT if token not in text)
    assert generate(model, [PROMPT], 3, GREEDY, stop_ids=(in_prompt_alone,)) == [text]


@pytest.mark.parametrize("prompts", [[[]], [PROMPT, []]])
def test_an_empty_prompt_is_refused(prompts):
    with pytest.raises(ValueError, match="empty prompt"):
        generate(transformer(), prompts, 5)


@pytest.mark.parametrize("prompt", [[30], [-1]])
def test_ids_outside_the_vocabulary_are_refused(prompt):
    with pytest.raises(ValueError, match="vocabulary of 30"):
        generate(transformer(), [prompt], 5)


def test_no_prompts_give_no_texts():
    assert generate(transformer(), [], 5) == []
