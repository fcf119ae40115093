import json
from pathlib import Path

import torch

from model import LMConfig
from runs.folder import RunFolder, seed_everything
from training.arguments import TrainingArguments
from training.engine.launch import Engine


def test_every_file_of_a_run_lies_in_its_folder():
    run = RunFolder(Path("out/runs/x"))
    assert all(str(path).startswith("out/runs/x") for path in vars(run).values())
    assert run.checkpoint(7) == Path("out/runs/x/checkpoints/step-00000007")


def test_settings_tell_what_was_asked_and_what_ran_it(tmp_path, accelerator):
    (tmp_path / "elsewhere.model").write_bytes(b"pieces")
    args = TrainingArguments(batch_size=3)
    config = LMConfig(dim=32, n_heads=4)
    engine = Engine(accelerator, "single process, no engine", None)
    run = RunFolder(tmp_path)
    run.write_settings(args, config, engine, tmp_path / "elsewhere.model")
    assert run.tokenizer.read_bytes() == b"pieces"
    settings = json.loads((tmp_path / "settings.json").read_text(encoding="utf-8"))
    assert settings["arguments"]["batch_size"] == 3
    assert settings["model"] == config.to_dict()
    assert (settings["engine"], settings["processes"]) == ("single process, no engine", 1)
    assert settings["deepspeed"] is None
    assert settings["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_another_rank_or_seed_draws_other_numbers():
    draws = []
    for seed, rank in ((42, 0), (42, 1), (42, 7), (43, 0), (42, 0)):
        seed_everything(seed, rank)
        draws.append(torch.rand(4).tolist())
    assert draws[0] == draws[-1]
    assert len({tuple(draw) for draw in draws}) == 4
