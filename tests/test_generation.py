import pytest
import torch

from model import LMConfig, Transformer
from model.generation import generate

PROMPT = [3, 1, 4, 1, 5]


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
    """The likeliest next token, n times; a sequence over the context loses its first tokens."""
    tokens = list(prompt)
    for _ in range(n):
        seen = tokens[-model.config.max_seq_len :]
        with torch.no_grad():
            tokens.append(model(torch.tensor([seen])).logits[0, -1].argmax().item())
    return tokens[len(prompt) :]


@pytest.mark.parametrize("n", [0, 1, 6, 25])  # 25 is beyond the context of 12
def test_with_one_candidate_it_is_the_likeliest_token_each_time(n):
    model = transformer()
    expected = step_by_step(model, PROMPT, n)
    assert len(expected) == n
    assert n < 25 or len(set(expected)) > 3
    assert generate(model, PROMPT, n, top_k=1) == expected


def test_the_same_seed_gives_the_same_text_and_another_seed_another():
    model = transformer()
    texts = [generate(model, PROMPT, 20, temperature=2.0, seed=seed) for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


def test_the_seed_counts_and_not_the_state_of_the_global_generator():
    model = transformer()
    first = generate(model, PROMPT, 20, seed=7)
    torch.rand(100)
    assert generate(model, PROMPT, 20, seed=7) == first


def test_the_stop_token_ends_the_text_and_is_not_part_of_it():
    model = transformer()
    text = generate(model, PROMPT, 20, temperature=2.0, seed=1)
    stop_id = text[7]
    stopped = generate(model, PROMPT, 20, temperature=2.0, seed=1, stop_id=stop_id)
    assert stopped == text[: text.index(stop_id)]


def test_a_stop_token_in_the_prompt_does_not_stop():
    model = transformer()
    text = generate(model, PROMPT, 3, top_k=1)
    in_prompt_alone = next(token for token in PROMPT if token not in text)
    assert generate(model, PROMPT, 3, top_k=1, stop_id=in_prompt_alone) == text


@pytest.mark.parametrize("length", [12, 13, 40])
def test_of_a_long_prompt_only_the_last_context_counts(length):
    model = transformer()
    prompt = torch.randint(30, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    text = generate(model, prompt, 10, seed=3)
    assert len(text) == 10
    assert text == generate(model, prompt[-12:], 10, seed=3)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="empty prompt"):
        generate(transformer(), [], 5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (0.0, -1.0, float("nan"))),
        *(("top_k", value) for value in (0, -1)),
    ],
)
def test_a_setting_that_cannot_be_sampled_with_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        generate(transformer(), PROMPT, 5, **{name: value})


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 8), (0.5, 3), (2.0, 50)])
def test_tokens_are_drawn_by_their_probability_among_the_likeliest(temperature, top_k):
    model = transformer(vocab_size=8)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, -1].double() / temperature
    left_out = logits < logits.sort(descending=True).values[min(top_k, 8) - 1]
    expected = logits.masked_fill(left_out, -torch.inf).softmax(-1)

    draws = 1500
    drawn = torch.zeros(8, dtype=torch.float64)
    for seed in range(draws):
        (token,) = generate(model, PROMPT, 1, temperature=temperature, top_k=top_k, seed=seed)
        drawn[token] += 1
    assert (drawn[expected == 0] == 0).all()
    assert ((drawn / draws - expected).abs() < 4 * (expected / draws).sqrt() + 1e-9).all()


def test_generating_leaves_no_gradient_and_no_trace_in_the_model():
    model = transformer()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    generate(model, PROMPT, 5)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
