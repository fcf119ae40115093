import pytest
import torch

from inference.sampling import Sampler, Sampling, choose, penalise

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, 3.0, -2.0]])


def frequencies(sampling: Sampling, draws: int = 20000) -> torch.Tensor:
    """How often each token is drawn when the numbers are spread evenly."""
    numbers = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    tokens = choose(LOGITS.expand(draws, -1), sampling, numbers)
    return torch.bincount(tokens, minlength=6) / draws


def expected(kept: list[int], temperature: float = 1.0) -> torch.Tensor:
    p = torch.zeros(6)
    p[kept] = torch.softmax(LOGITS[0, kept] / temperature, dim=-1)
    return p


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 0}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 100}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 2}, [4, 0]),
        ({"top_k": 1}, [4]),
        # probabilities in order: 4: .636, 0: .234, 1: .086, 2: .032, 3: .012, 5: .004
        ({"top_p": 0.6}, [4]),
        ({"top_p": 0.64}, [4, 0]),
        ({"top_p": 0.88}, [4, 0, 1]),
        ({"top_p": 1e-9}, [4]),
        ({"min_p": 0.13}, [4, 0, 1]),
        ({"min_p": 0.14}, [4, 0]),
        ({"min_p": 1.0}, [4]),
        ({"top_p": 0.95, "min_p": 0.2}, [4, 0]),
        ({"top_k": 3, "top_p": 0.6}, [4]),
    ],
    ids=str,
)
def test_tokens_are_drawn_by_their_probability_among_those_kept(settings, kept):
    sampling = Sampling(**{"temperature": 1.0, "top_k": 0} | settings)
    assert torch.allclose(frequencies(sampling), expected(kept), atol=2e-4)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_temperature_divides_the_logits(temperature):
    drawn = frequencies(Sampling(temperature=temperature, top_k=0))
    assert torch.allclose(drawn, expected([0, 1, 2, 3, 4, 5], temperature), atol=2e-4)


def test_at_temperature_zero_the_likeliest_is_taken():
    assert frequencies(Sampling(temperature=0)).tolist() == [0, 0, 0, 0, 1, 0]


def test_a_tiny_temperature_does_not_overflow():
    assert frequencies(Sampling(temperature=1e-30)).tolist() == [0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_the_smallest_and_largest_number_draw_tokens_that_are_kept(number):
    numbers = torch.tensor([number], dtype=torch.float64)
    token = choose(LOGITS, Sampling(temperature=1.0, top_k=4, top_p=0.9), numbers)
    assert token.item() in (4, 0, 1)


def test_a_penalty_makes_what_is_present_less_likely_whatever_the_sign():
    present = torch.tensor([[True, False, True, True, False, False]])
    assert penalise(LOGITS, present, 2.0).tolist() == [[1.0, 1.0, 0.0, -2.0, 3.0, -2.0]]


def test_the_penalty_counts_the_prompt_and_what_was_drawn():
    sampler = Sampler(
        Sampling(temperature=0, repetition_penalty=10.0), [[4]], 6, torch.device("cpu")
    )
    assert [sampler(LOGITS).item() for _ in range(3)] == [0, 1, 4]


def test_each_row_has_numbers_of_its_own_seed():
    def draws(seed: int, rows: int) -> list[list[int]]:
        sampler = Sampler(
            Sampling(temperature=5.0, seed=seed), [[0]] * rows, 6, torch.device("cpu")
        )
        return torch.stack([sampler(LOGITS.expand(rows, -1)) for _ in range(30)], 1).tolist()

    together = draws(7, 3)
    assert together == [draws(seed, 1)[0] for seed in (7, 8, 9)]
    assert together[0] != together[1]


def test_rows_that_are_kept_keep_their_numbers():
    def sampler() -> Sampler:
        return Sampler(
            Sampling(temperature=5.0, repetition_penalty=1.3),
            [[0], [1], [2]],
            6,
            torch.device("cpu"),
        )

    whole, part = sampler(), sampler()
    part.keep([2, 0])
    for _ in range(30):
        assert part(LOGITS.expand(2, -1)).tolist() == whole(LOGITS.expand(3, -1))[[2, 0]].tolist()


def test_drawing_leaves_the_global_random_numbers_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    Sampler(Sampling(), [[0]], 6, torch.device("cpu"))(LOGITS)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, float("inf"), float("nan"))),
        *(("repetition_penalty", value) for value in (0.0, -1.0, float("nan"))),
        *(("top_p", value) for value in (0.0, 1.1, float("nan"))),
        *(("min_p", value) for value in (-0.1, 1.1, float("nan"))),
        ("top_k", -1),
        ("seed", -1),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        Sampling(**{name: value})
