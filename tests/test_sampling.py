"""Tokens are drawn by their probabilities among the tokens that the settings keep."""

import pytest
import torch

from lm.inference.sampling import Sampling, choose, penalise

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, 3.0, -2.0]])
NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 0}, [4]),
        ({"temperature": 1e-30}, [4]),
        ({"top_k": 100}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 2}, [4, 0]),
        # probabilities in order: 4: .634, 0: .233, 1: .086, 2: .032, 3: .012, 5: .004
        ({"top_p": 0.6}, [4]),
        ({"top_p": 0.64}, [4, 0]),
        ({"top_p": 0.88}, [4, 0, 1]),
        ({"min_p": 0.13}, [4, 0, 1]),
        ({"min_p": 0.14}, [4, 0]),
        ({"top_p": 0.95, "min_p": 0.2}, [4, 0]),
        ({"top_k": 3, "top_p": 0.65}, [4]),  # .665 among the three
    ],
    ids=str,
)
def test_tokens_are_drawn_by_their_probability_among_those_kept(settings, kept):
    """The random numbers are spread evenly, so the frequencies are close to the probabilities."""
    sampling, draws = Sampling(**{"temperature": 1.0, "top_k": 0} | settings), 20_000
    numbers = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    tokens = choose(LOGITS.expand(draws, -1), sampling, numbers)
    expected = torch.zeros(6)
    expected[kept] = torch.softmax(LOGITS[0, kept] / (sampling.temperature or 1.0), dim=-1)
    assert torch.allclose(torch.bincount(tokens, minlength=6) / draws, expected, atol=2e-4)


def test_a_penalty_makes_tokens_of_the_text_less_likely_for_either_sign_of_the_logit():
    logits = LOGITS.repeat(2, 1)
    penalised = penalise(logits, [[0, 2, 3, 0], [4]], 2.0).tolist()
    assert penalised == [[1.0, 1.0, 0.0, -2.0, 3.0, -2.0], [2.0, 1.0, 0.0, -1.0, 1.5, -2.0]]
    assert torch.equal(logits, LOGITS.repeat(2, 1))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (-0.1, INFINITY, NAN)),
        ("repetition_penalty", (0.0, INFINITY, NAN)),
        ("top_p", (0.0, 1.1, NAN)),
        ("min_p", (-0.1, 1.1, NAN)),
        ("top_k", (-1,)),
        ("seed", (-1, 2**63)),
    ],
)
def test_a_setting_outside_its_limits_is_refused_with_its_name(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{name} must be .*, not {value}"):
            Sampling(**{name: value})
