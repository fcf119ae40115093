import json
import pickle

import numpy as np
import pytest
import torch

from lm.common.errors import UsageError
from lm.data.dataset import PackedDataset, WithNoise
from lm.data.shards import ShardWriter, write_description


def make_folder(folder, train: list, vocab_size: int, val=(), shard_tokens=10**6, **more):
    """Make a prepared folder of texts or conversations, without a tokenizer. A text is its tokens,
    a conversation a pair: its tokens and the spans of its answers."""
    folder.mkdir(exist_ok=True)
    splits = {}
    for split, documents in (("train", train), ("val", val)):
        writer = ShardWriter(folder, split, vocab_size, shard_tokens)
        for document in documents:
            tokens, *answers = document if isinstance(document, tuple) else (document,)
            writer.write(tokens, 3 * len(tokens), *answers)
        splits[split] = writer.close()
    write_description(folder, {"vocab_size": vocab_size, "splits": splits} | more)
    return folder


def random_documents(vocab_size: int, n=40, seed=0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 30, n)
    return [generator.integers(0, vocab_size, length) for length in lengths]


@pytest.mark.parametrize("shard_tokens", [1, 20, 10**6])
@pytest.mark.parametrize("seq_len", [1, 16, 50])
def test_samples_are_slices_of_the_stream_wherever_shards_end(tmp_path, shard_tokens, seq_len):
    vocab_size = 70_000 if seq_len == 16 else 300
    documents = random_documents(vocab_size)
    folder = make_folder(tmp_path / "data", documents, vocab_size, shard_tokens=shard_tokens)
    dataset, stream = PackedDataset(folder, "train", seq_len), np.concatenate(documents)
    assert len(dataset) == (len(stream) - 1) // seq_len
    for i, (tokens, targets) in enumerate(dataset):
        assert tokens.dtype == targets.dtype == torch.int64
        assert tokens.tolist() == stream[i * seq_len : (i + 1) * seq_len].tolist()
        assert targets.tolist() == stream[i * seq_len + 1 : (i + 1) * seq_len + 1].tolist()
    assert i == len(dataset) - 1
    for i in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset[i]


def test_a_split_that_is_shorter_than_one_sequence_is_refused(tmp_path):
    folder = make_folder(tmp_path / "data", [np.arange(17)], 300)
    dataset = PackedDataset(folder, "train", 16)
    assert (len(dataset), dataset.bytes_per_token) == (1, 3)
    with pytest.raises(UsageError, match=r"train split has 17 tokens.*a sequence needs 18"):
        PackedDataset(folder, "train", 17)
    with pytest.raises(UsageError, match=r"val split has 0 tokens.*use other text"):
        PackedDataset(folder, "val", 16)


def test_an_id_outside_the_vocabulary_is_found(tmp_path):
    documents = random_documents(300)
    documents[0][0] = 299  # the largest valid id
    documents[-10][0] = 300
    position = sum(map(len, documents[:-10]))
    folder = make_folder(tmp_path / "data", documents, 300, shard_tokens=50)
    dataset = PackedDataset(folder, "train", 16)
    with pytest.raises(UsageError, match=rf"{folder}: damaged.* token id 300 .*vocabulary of 300"):
        dataset[position // 16]
    dataset[0]


def test_a_sample_belongs_to_the_document_in_which_it_begins(tmp_path):
    bos = 1
    documents = [np.array([bos] + [5] * n) for n in (5, 2, 6)]  # beginning at tokens 0, 6 and 9
    for shard_tokens in (10**6, 1):  # one shard; one shard per document
        make_folder(tmp_path, documents, 10, shard_tokens=shard_tokens)
        dataset = PackedDataset(tmp_path, "train", 3)
        assert dataset.documents_of(range(len(dataset)), bos).tolist() == [0, 0, 1, 2, 2]
        assert dataset.documents_of([4, 1], bos).tolist() == [2, 0]


def test_noise_replaces_a_share_of_the_input_tokens_but_none_of_the_first_segmentation(tmp_path):
    folder = make_folder(tmp_path, [np.arange(60_001)], 70_000)
    description = json.loads((folder / "dataset.json").read_text())
    description["splits"]["train"]["first_tokens"] = 20_000
    (folder / "dataset.json").write_text(json.dumps(description))
    clean = PackedDataset(folder, "train", 1000)
    noisy, other_seed = (WithNoise(clean, 0.1, seed) for seed in (42, 1))
    again = pickle.loads(pickle.dumps(noisy))  # as in a process that reads batches
    assert (len(noisy), clean.n_first) == (60, 20)
    tokens, targets = map(torch.stack, zip(*clean, strict=True))
    found, same_targets = map(torch.stack, zip(*map(noisy.__getitem__, range(60)), strict=True))
    assert torch.equal(targets, same_targets)
    changed = found != tokens
    assert not changed[:20].any()
    shares = changed[20:].float().mean(dim=1)
    assert 0.05 < shares.min() < shares.max() < 0.15
    assert shares.mean() == pytest.approx(0.1, abs=0.01)
    assert len(changed.unique(dim=0)) == 41  # each sample has noise at other places
    assert found[changed].float().mean() == pytest.approx(30_000, abs=6_000)  # of the whole text
    for i in (59, 30):
        assert torch.equal(again[i][0], found[i])
        assert not torch.equal(other_seed[i][0], found[i])
