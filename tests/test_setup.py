import torch

from training.setup import seed_everything


def test_another_rank_or_seed_draws_other_numbers():
    draws = []
    for seed, rank in ((42, 0), (42, 1), (42, 7), (43, 0), (42, 0)):
        seed_everything(seed, rank)
        draws.append(torch.rand(4).tolist())
    assert draws[0] == draws[-1]
    assert len({tuple(draw) for draw in draws}) == 4
