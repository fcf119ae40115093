import shutil
from pathlib import Path

import pytest
import torch
from conftest import VOCAB_SIZE
from small_model import save_model

from lm.common.errors import UsageError
from lm.formats.portable import save_portable
from lm.storage.checkpoint import OPTIMIZER, RANDOM, WEIGHTS, write_checkpoint
from lm.storage.folder import RunFolder
from lm.storage.weights import load_trained
from model import LMConfig, Transformer

SHAPE = {"dim": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 32, "vocab_size": VOCAB_SIZE}


def model_of(seed: int) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(LMConfig(**SHAPE))


def weights_of(model: Transformer) -> dict:
    return {name: p.data for name, p in model.named_parameters()}


def save(run: Path, step: int, val_loss: float | None = None) -> None:
    """Save a checkpoint. The model's weights are random; their seed is the step."""
    tensors = {WEIGHTS: weights_of(model_of(step)), OPTIMIZER: {}, RANDOM: {}}
    state = {"step": step, "processes": 1, "optimizer_step": step, "identity": {}}
    state |= {"model": LMConfig(**SHAPE).to_dict(), "val_loss": val_loss}
    write_checkpoint(RunFolder(run), tensors, state)


@pytest.fixture
def run(tmp_path, packed) -> Path:
    """An unfinished run with two checkpoints."""
    run = tmp_path / "out" / "runs" / "mine"
    run.mkdir(parents=True)
    shutil.copy(packed / "tokenizer.model", run)
    save(run, 10)
    save(run, 20)
    return run


@pytest.fixture
def weights(run, packed) -> Path:
    """The final weights of `run`, which mark the run as finished; their seed is 30."""
    return save_model(run / "weights", model_of(30), packed)


def seed_of(name: str | Path) -> int:
    """Return the seed of the model that `load_trained` opens."""
    trained = load_trained(str(name))
    assert not trained.model.training
    assert trained.tokenizer.vocab_size == VOCAB_SIZE
    embedding = trained.model.tok_embeddings.weight
    seeds = (10, 20, 30)
    return next(s for s in seeds if torch.equal(model_of(s).tok_embeddings.weight, embedding))


def test_an_unfinished_run_opens_its_newest_checkpoint(run):
    assert seed_of(run) == 20
    assert seed_of(run / "checkpoints" / "step-00000010") == 10
    trained, checkpoint = load_trained(str(run)), run / "checkpoints" / "step-00000020"
    assert (trained.name, trained.folder) == ("mine@step-00000020", checkpoint)


def test_a_finished_run_opens_its_weights_which_also_work_alone(run, weights, tmp_path):
    trained = load_trained(str(run))
    assert (trained.name, trained.folder) == ("mine", weights)
    assert seed_of(run) == seed_of(weights) == 30
    alone = weights.rename(tmp_path / "elsewhere@best")  # "@best" is in its name
    assert seed_of(alone) == 30
    assert load_trained(str(alone)).name == "elsewhere@best"


def test_run_at_best_opens_the_checkpoint_of_the_lowest_validation_loss(run, monkeypatch):
    with pytest.raises(UsageError, match="no checkpoint of this run has a validation loss"):
        load_trained(f"{run}@best")
    for step, loss in ((10, 2.5), (20, 2.6), (30, None)):
        save(run, step, val_loss=loss)
    assert seed_of(f"{run}@best") == 10
    assert seed_of(run) == 30
    monkeypatch.chdir(run.parents[2])
    assert seed_of("auto@best") == 10


def test_a_damaged_checkpoint_is_named_and_skipped_but_refused_when_asked_for(run, capsys):
    newest = run / "checkpoints" / "step-00000020"
    (newest / "weights.safetensors").write_bytes(b"cut")
    assert seed_of(run) == 10
    assert f"DAMAGED CHECKPOINT {newest}: the checksum of weights" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"step-00000020 is damaged: the checksum of weights"):
        load_trained(str(newest))
    (run / "checkpoints" / "step-00000010" / "weights.safetensors").unlink()
    with pytest.raises(UsageError, match=r"no undamaged checkpoint: .*10 is damaged"):
        load_trained(str(run))


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("config.json", r"no readable config.json \(No such file or directory\)$"),
        ("tokenizer.model", "no such tokenizer file"),
    ],
)
def test_incomplete_weights_are_refused_even_if_a_checkpoint_is_sound(run, weights, file, says):
    (weights / file).unlink()
    for name in (run, weights):
        with pytest.raises(UsageError, match=says):
            load_trained(str(name))


def test_a_tokenizer_with_more_pieces_than_the_model_is_refused(weights):
    config = LMConfig(**SHAPE | {"vocab_size": VOCAB_SIZE - 1})
    save_portable(weights, config, weights_of(Transformer(config)))
    with pytest.raises(UsageError, match=rf"has {VOCAB_SIZE} pieces, .* {VOCAB_SIZE - 1}"):
        load_trained(str(weights))
