import json
import shutil
from pathlib import Path

import pytest
import torch

from common.errors import UsageError
from data.errors import DataError
from formats.portable import save_portable
from model import ConfigError, LMConfig, Transformer
from runs.checkpoint import OPTIMIZER, RANDOM, WEIGHTS, write_checkpoint
from runs.folder import RunFolder
from runs.weights import WeightsFolder, load_trained
from tests.conftest import VOCAB_SIZE

SHAPE = {"dim": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 32, "vocab_size": VOCAB_SIZE}


def model_of(seed: int) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(LMConfig(**SHAPE))


def weights_of(model: Transformer) -> dict:
    return {name: p.data for name, p in model.named_parameters()}


def save(run: Path, step: int, **state) -> None:
    """A checkpoint of a model seeded with its step."""
    tensors = {WEIGHTS: weights_of(model_of(step)), OPTIMIZER: {}, RANDOM: {}}
    state = {"step": step, "processes": 1, "optimizer_step": step, "identity": {}} | state
    write_checkpoint(RunFolder(run), tensors, state)


@pytest.fixture
def run(tmp_path, packed) -> Path:
    """A run under way, with two checkpoints, the older one in the old form."""
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("")
    shutil.copy(packed / "tokenizer.model", run)
    save(run, 10, identity=SHAPE)
    save(run, 20, model=LMConfig(**SHAPE).to_dict())
    return run


@pytest.fixture
def weights(run, packed) -> Path:
    """The same, finished: its weights are those of seed 30."""
    save_portable(run / "weights", LMConfig(**SHAPE), weights_of(model_of(30)))
    shutil.copy(packed / "tokenizer.model", run / "weights")
    return run / "weights"


def seed_of(name: str | Path) -> int:
    """Of the model that was opened."""
    trained = load_trained(str(name))
    assert not trained.model.training
    assert trained.tokenizer.vocab_size == VOCAB_SIZE
    embedding = trained.model.tok_embeddings.weight
    seeds = (10, 20, 30)
    return next(s for s in seeds if torch.equal(model_of(s).tok_embeddings.weight, embedding))


def test_of_a_finished_run_it_is_the_weights(run, weights):
    assert seed_of(run) == seed_of(weights) == 30


def test_weights_alone_are_enough(weights, tmp_path):
    moved = tmp_path / "elsewhere"
    weights.rename(moved)
    assert seed_of(moved) == 30


def test_of_a_run_under_way_it_is_the_newest_checkpoint(run):
    assert seed_of(run) == 20
    assert seed_of(run / "checkpoints" / "step-00000010") == 10


def test_it_has_the_name_of_its_run(run, weights, tmp_path):
    assert load_trained(str(run)).name == load_trained(str(weights)).name == "mine"
    assert load_trained(str(weights.rename(tmp_path / "other"))).name == "other"
    assert load_trained(str(run)).name == "mine@step-00000020"


def test_where_the_weights_come_from_is_told_and_where_their_tokenizer_belongs(run, packed):
    checkpoint = run / "checkpoints" / "step-00000020"
    assert load_trained(str(run)).folder == checkpoint
    (run / "tokenizer.model").unlink()
    found = WeightsFolder.find(str(run))
    assert (found.path, found.is_checkpoint) == (checkpoint, True)
    assert found.tokenizer == run / "weights" / "tokenizer.model"
    assert not found.tokenizer.exists()
    save_portable(run / "weights", LMConfig(**SHAPE), weights_of(model_of(30)))
    shutil.copy(packed / "tokenizer.model", run / "weights")
    assert load_trained(str(run)).folder == run / "weights"
    assert not WeightsFolder.find(str(run)).is_checkpoint
    assert load_trained(str(checkpoint)).folder == checkpoint  # with the weights' tokenizer


@pytest.mark.parametrize("step", [10, 20])
def test_the_shape_is_known_before_anything_is_loaded(run, weights, step):
    for path in (run / "checkpoints" / f"step-{step:08d}", weights):
        assert WeightsFolder.find(str(path)).config() == LMConfig(**SHAPE)


def test_a_run_at_its_best_is_the_checkpoint_of_its_lowest_validation(run, weights, monkeypatch):
    for step, loss in ((10, 2.5), (20, 2.6)):
        save(run, step, model=LMConfig(**SHAPE).to_dict(), val_loss=loss)
    save(run, 30, model=LMConfig(**SHAPE).to_dict(), val_loss=None)
    assert seed_of(f"{run}@best") == 10
    assert seed_of(run) == 30
    assert WeightsFolder.find(f"{run}@best").path == run / "checkpoints" / "step-00000010"
    monkeypatch.setattr("runs.find.find_run.__defaults__", (run.parent, None))
    assert seed_of("auto@best") == 10


def test_a_best_checkpoint_that_is_damaged_is_refused_and_not_passed_over(run):
    for step, loss in ((10, 2.5), (20, 2.6)):
        save(run, step, model=LMConfig(**SHAPE).to_dict(), val_loss=loss)
    (run / "checkpoints" / "step-00000010" / "weights.safetensors").write_bytes(b"cut")
    with pytest.raises(UsageError, match=r"step-00000010 is damaged"):
        load_trained(f"{run}@best")


def test_what_has_no_validation_has_no_best(run, weights):
    for name in (run, weights):
        message = f"{name}@best: none of its checkpoints was saved at a validation"
        with pytest.raises(UsageError, match=f"^{message}$"):
            load_trained(f"{name}@best")
    with pytest.raises(UsageError, match=r"none: no such folder"):
        load_trained(f"{run.parent}/none@best")


def test_a_folder_that_is_really_called_so_is_taken_as_it_is(weights):
    named = weights.rename(weights.with_name("mine@best"))
    assert seed_of(named) == 30


@pytest.mark.parametrize("shape", [{"dim": 15}, {"depth": 3}, 7])
def test_a_checkpoint_whose_shape_cannot_be_built_is_named(run, shape):
    save(run, 30, model=shape)
    with pytest.raises(ConfigError, match=r"step-00000030/state.json: "):
        load_trained(str(run))


def test_a_damaged_checkpoint_is_passed_over_but_refused_when_named(run):
    newest = run / "checkpoints" / "step-00000020"
    (newest / "weights.safetensors").write_bytes(b"cut")
    assert seed_of(run) == 10
    with pytest.raises(UsageError, match=r"step-00000020 is damaged: weights.safetensors is 3"):
        load_trained(str(newest))


def test_a_run_with_nothing_but_damaged_checkpoints_says_so(run):
    for path in run.glob("checkpoints/*/weights.safetensors"):
        path.unlink()
    with pytest.raises(UsageError, match=r"every checkpoint of .* is damaged"):
        load_trained(str(run))


def test_a_path_that_is_not_there_or_a_file_or_something_else_is_refused(tmp_path, packed):
    with pytest.raises(UsageError, match="no such folder"):
        load_trained(str(tmp_path / "none"))
    with pytest.raises(UsageError, match="is a file: give a run folder"):
        load_trained(str(packed / "tokenizer.model"))
    with pytest.raises(UsageError, match=r"neither model.safetensors nor checkpoints"):
        load_trained(str(packed))


def test_damaged_weights_are_not_passed_over_for_a_checkpoint(run, weights):
    (weights / "config.json").unlink()
    for name in (run, weights):
        with pytest.raises(ConfigError, match=r"no readable config.json"):
            load_trained(str(name))


def test_a_missing_tokenizer_is_named(weights):
    (weights / "tokenizer.model").unlink()
    with pytest.raises(DataError, match=r"tokenizer.model: no such tokenizer file"):
        load_trained(str(weights))


def test_a_tokenizer_with_more_pieces_than_the_model_is_refused(packed, tmp_path):
    shape = SHAPE | {"vocab_size": VOCAB_SIZE - 1}
    model = Transformer(LMConfig(**shape))
    save_portable(tmp_path / "small", LMConfig(**shape), weights_of(model))
    shutil.copy(packed / "tokenizer.model", tmp_path / "small")
    with pytest.raises(DataError, match=rf"has {VOCAB_SIZE} pieces, .* only {VOCAB_SIZE - 1}"):
        load_trained(str(tmp_path / "small"))


def test_weights_of_another_shape_are_refused(weights):
    config = json.loads((weights / "config.json").read_text())
    (weights / "config.json").write_text(json.dumps(config | {"dim": 32}))
    with pytest.raises(ConfigError, match=r"is \(.*\), the model has \("):
        load_trained(str(weights))


def test_a_hugging_face_folder_is_told_from_our_own(weights):
    (weights / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UsageError, match=r"scripts.import_weights .* turns it into"):
        load_trained(str(weights))
