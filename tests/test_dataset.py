import json
import pickle
import random
import shutil

import numpy as np
import pytest
import torch
from conftest import VOCAB_SIZE
from torch.utils.data import DataLoader

from data.dataset import PackedDataset
from data.errors import DataError
from data.shards import ShardWriter, token_dtype


def make_folder(folder, train: list[np.ndarray], vocab_size: int, val=(), shard_tokens=10**6):
    """A prepared folder with these documents, without tokenizer."""
    folder.mkdir(exist_ok=True)
    splits = {}
    for split, documents in (("train", train), ("val", val)):
        writer = ShardWriter(folder, split, token_dtype(vocab_size), shard_tokens)
        for document in documents:
            writer.write(document, 3 * len(document))
        splits[split] = writer.close()
    description = {
        "format": 1,
        "dtype": token_dtype(vocab_size).str,
        "vocab_size": vocab_size,
        "splits": splits,
    }
    (folder / "dataset.json").write_text(json.dumps(description))
    return folder


def random_documents(vocab_size: int, n=40, seed=0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 30, n)
    return [generator.integers(0, vocab_size, length) for length in lengths]


def assert_samples_are_slices(dataset: PackedDataset, stream: np.ndarray, seq_len: int) -> None:
    assert len(dataset) == (len(stream) - 1) // seq_len
    for i in range(len(dataset)):
        tokens, targets = dataset[i]
        assert tokens.dtype == targets.dtype == torch.int64
        assert tokens.tolist() == stream[i * seq_len : (i + 1) * seq_len].tolist()
        assert targets.tolist() == stream[i * seq_len + 1 : (i + 1) * seq_len + 1].tolist()


@pytest.mark.parametrize("seq_len", [1, 7, 64])
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_sample_is_a_slice_of_the_stream_and_its_targets_the_next_tokens(packed, split, seq_len):
    stream = np.fromfile(packed / f"{split}-00000.bin", "<u2")
    assert_samples_are_slices(PackedDataset(packed, split, seq_len), stream, seq_len)


@pytest.mark.parametrize("vocab_size", [300, 70_000])
@pytest.mark.parametrize("shard_tokens", [1, 20, 100])
@pytest.mark.parametrize("seq_len", [1, 16, 50])
def test_samples_do_not_care_where_shards_end(tmp_path, vocab_size, shard_tokens, seq_len):
    documents = random_documents(vocab_size)
    folder = make_folder(tmp_path / "data", documents, vocab_size, shard_tokens=shard_tokens)
    assert len(list(folder.glob("train-*.bin"))) > 3
    dataset = PackedDataset(folder, "train", seq_len)
    assert_samples_are_slices(dataset, np.concatenate(documents), seq_len)


@pytest.mark.parametrize(("tokens", "samples"), [(17, 1), (32, 1), (33, 2), (48, 2), (49, 3)])
def test_the_last_target_must_exist_for_a_sample_to_count(tmp_path, tokens, samples):
    folder = make_folder(tmp_path / "data", [np.arange(tokens)], 300)
    dataset = PackedDataset(folder, "train", 16)
    assert len(dataset) == samples
    assert dataset[samples - 1][1][-1] == 16 * samples


def test_iterating_ends_after_the_last_sample(tmp_path):
    dataset = PackedDataset(make_folder(tmp_path / "data", [np.arange(40)], 300), "train", 16)
    assert [tokens[0].item() for tokens, _ in dataset] == [0, 16]


@pytest.mark.parametrize("shard_tokens", [10, 20, 100])
def test_an_index_outside_is_an_error_and_not_another_sample(tmp_path, shard_tokens):
    documents = [np.arange(10)] * 4
    folder = make_folder(tmp_path / "data", documents, 300, shard_tokens=shard_tokens)
    dataset = PackedDataset(folder, "train", 8)
    assert len(dataset) == 4
    for i in (4, 5, 1000, -1, -2, -3, -5):
        with pytest.raises(IndexError):
            dataset[i]


@pytest.mark.parametrize("tokens", [1, 16])
def test_a_split_shorter_than_one_sequence_is_refused_with_both_lengths(tmp_path, tokens):
    folder = make_folder(tmp_path / "data", [np.arange(tokens)], 300)
    with pytest.raises(DataError, match=rf"train split has {tokens} tokens.*max_seq_len \+ 1 = 17"):
        PackedDataset(folder, "train", 16)


def test_an_empty_split_is_refused(tmp_path):
    folder = make_folder(tmp_path / "data", [np.arange(100)], 300)
    with pytest.raises(DataError, match="val split has 0 tokens"):
        PackedDataset(folder, "val", 16)


def test_bytes_per_token_are_those_of_the_split(packed):
    part = json.loads((packed / "dataset.json").read_text(encoding="utf-8"))["splits"]["val"]
    assert PackedDataset(packed, "val", 8).bytes_per_token == part["bytes"] / part["tokens"]


@pytest.mark.parametrize("vocab_size", [300, 70_000])
@pytest.mark.parametrize("bad_id", [0, 1])  # above the largest id
def test_an_id_outside_the_vocabulary_is_found(tmp_path, vocab_size, bad_id):
    documents = random_documents(vocab_size)
    documents[-10][0] = vocab_size + bad_id
    position = sum(map(len, documents[:-10]))
    folder = make_folder(tmp_path / "data", documents, vocab_size, shard_tokens=50)
    dataset = PackedDataset(folder, "train", 16)
    expected = rf"{folder}: token id {vocab_size + bad_id} .*vocabulary of {vocab_size}"
    with pytest.raises(DataError, match=expected):
        dataset.scan()
    with pytest.raises(DataError, match=expected):
        dataset[position // 16]
    dataset[0]


def test_the_largest_id_of_the_vocabulary_is_sound(tmp_path):
    dataset = PackedDataset(make_folder(tmp_path / "data", [np.full(40, 299)], 300), "train", 16)
    dataset.scan()
    assert dataset[1][0].tolist() == [299] * 16


def test_a_foreign_shard_of_the_same_length_is_found_by_its_ids(packed, tmp_path):
    folder = shutil.copytree(packed, tmp_path / "copy")
    path = folder / "train-00000.bin"
    path.write_bytes(random.Random(0).randbytes(path.stat().st_size))
    with pytest.raises(DataError, match=f"outside the vocabulary of {VOCAB_SIZE}"):
        PackedDataset(folder, "train", 16).scan()


@pytest.mark.parametrize("damage", ["missing", "truncated", "longer"])
def test_a_damaged_shard_is_refused_at_once(packed, tmp_path, damage):
    folder = shutil.copytree(packed, tmp_path / "copy")
    path = folder / "val-00000.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-2] if damage == "truncated" else data + b"\0\0")
    if damage == "missing":
        path.unlink()
    for split in ("train", "val"):
        with pytest.raises(DataError, match=r"val-00000\.bin"):
            PackedDataset(folder, split, 16)


def test_pickling_does_not_carry_the_data(tmp_path):
    folder = make_folder(tmp_path / "data", [np.arange(100_000) % 300], 300)
    dataset = PackedDataset(folder, "train", 16)
    before = dataset[5]
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 5000
    copy = pickle.loads(pickled)
    assert len(copy) == len(dataset)
    assert all(map(torch.equal, copy[5], before))
    assert all(map(torch.equal, dataset[5], before))


@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_is_moved_away_can_still_be_read_to_its_end(packed, tmp_path, workers):
    folder = shutil.copytree(packed, tmp_path / "data")
    for split in ("train", "val"):
        expected = list(PackedDataset(packed, split, 16))
        dataset = PackedDataset(folder, split, 16)
        folder.rename(tmp_path / "moved")
        loader = DataLoader(dataset, batch_size=None, num_workers=workers)
        for sample, same in zip(loader, expected, strict=True):
            assert all(map(torch.equal, sample, same))
        (tmp_path / "moved").rename(folder)


def test_samples_are_copies_that_may_be_written_to(packed):
    dataset = PackedDataset(packed, "train", 16)
    tokens, _ = dataset[0]
    before = tokens.clone()
    tokens.zero_()
    assert torch.equal(dataset[0][0], before)


JUNK = [None, True, False, 0, -1, 1, 2, 10**6, 10**30, 1.0, -0.5, 1e308, "", "x", "\0", "\ud800"]
JUNK += ["<u4", ",u2", "(2", "train", "x" * 5000, [], [[]], {}, {"a": 1}, [{}], ["file"]]


def every_place(tree, found=None) -> list[tuple]:
    """(container, key) of every value in a tree of dicts and lists."""
    found = [] if found is None else found
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        found.append((tree, key))
        if isinstance(tree[key], dict | list):
            every_place(tree[key], found)
    return found


def without_a_key(text: str, chooser: random.Random) -> bytes:
    description = json.loads(text)
    container, key = chooser.choice(every_place(description))
    del container[key]
    return json.dumps(description).encode()


def with_junk(text: str, chooser: random.Random) -> bytes:
    description = json.loads(text)
    container, key = chooser.choice(every_place(description))
    container[key] = chooser.choice(JUNK)
    return json.dumps(description).encode()


def with_another_type(text: str, chooser: random.Random) -> bytes:
    description = json.loads(text)
    container, key = chooser.choice(every_place(description))
    value = container[key]
    others = [[value], {"value": value}, str(value)]
    if isinstance(value, int):
        others += [float(value), -value, value + 1]
    container[key] = chooser.choice(others)
    return json.dumps(description).encode()


def with_bytes_flipped(text: str, chooser: random.Random) -> bytes:
    data = bytearray(text.encode())
    for _ in range(chooser.choice([1, 1, 1, 3])):
        data[chooser.randrange(len(data))] = chooser.randrange(256)
    return bytes(data)


def cut_short(text: str, chooser: random.Random) -> bytes:
    return text.encode()[: chooser.randrange(len(text))]


@pytest.mark.parametrize(
    "damage", [without_a_key, with_junk, with_another_type, with_bytes_flipped, cut_short]
)
def test_a_damaged_description_is_refused_or_still_works(packed, tmp_path, damage):
    folder = shutil.copytree(packed, tmp_path / "copy")
    path = folder / "dataset.json"
    sound = path.read_text(encoding="utf-8")
    expected = {split: PackedDataset(folder, split, 16)[0] for split in ("train", "val")}
    refused, wrong = 0, []
    for seed in range(400):
        path.write_bytes(damage(sound, random.Random(seed)))
        try:
            for split in ("train", "val"):
                dataset = PackedDataset(folder, split, 16)
                dataset.scan()
                dataset[len(dataset) - 1]
                assert all(map(torch.equal, dataset[0], expected[split])), "other samples"
                assert dataset.bytes_per_token > 0, "bytes per token"
        except DataError:
            refused += 1
        except Exception as error:
            wrong.append(f"seed {seed}: {type(error).__name__}: {error}")
    assert wrong == []
    assert refused > 20


def test_a_sample_belongs_to_the_document_in_which_it_begins(tmp_path):
    bos = 1
    documents = [np.array([bos] + [5] * n) for n in (5, 2, 6)]  # they begin at 0, 6 and 9
    for shard_tokens in (10**6, 1):  # one shard, and one for each document
        make_folder(tmp_path, documents, 10, shard_tokens=shard_tokens)
        dataset = PackedDataset(tmp_path, "train", 3)
        assert dataset.documents_of(range(len(dataset)), bos).tolist() == [0, 0, 1, 2, 2]
        assert dataset.documents_of([4, 1], bos).tolist() == [2, 0]
