import torch
from test_conversation_set import conversation, make_set

from training.engine.launch import Engine
from training.setup import open_splits, seed_everything
from training.sft_arguments import SFTArguments


def test_another_rank_or_seed_draws_other_numbers():
    draws = []
    for seed, rank in ((42, 0), (42, 1), (42, 7), (43, 0), (42, 0)):
        seed_everything(seed, rank)
        draws.append(torch.rand(4).tolist())
    assert draws[0] == draws[-1]
    assert len({tuple(draw) for draw in draws}) == 4


def test_conversations_that_are_all_too_long_to_validate_on_are_said(accelerator, tmp_path, capsys):
    folder = make_set(tmp_path / "c", [conversation([(2, 3)])], val=[conversation([(30, 3)])])
    engine = Engine(accelerator, "single process", deepspeed=None)
    train_set, val_set = open_splits(SFTArguments(data=str(folder)), 8, engine)
    assert (len(train_set), val_set) == (1, None)
    assert "train with a larger --max_seq_len" in capsys.readouterr().out
