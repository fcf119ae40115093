import pickle

import numpy as np
import pytest
import torch
from conftest import error_of
from test_dataset import make_folder

from lm.data.conversation_set import ConversationRows, ConversationSet, pack
from lm.data.dataset import NothingFitsError, PackedDataset
from model import IGNORE_INDEX

VOCAB_SIZE = 500


def conversation(*ends: int, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens that count up from `first`, and the span of each answer. `ends` are the ends
    of the first question, its answer, the second question, ..."""
    return (first + np.arange(ends[-1])) % VOCAB_SIZE, np.reshape(ends, (-1, 2))


def many() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    ends = [np.cumsum(rng.integers(1, 12, 2 * rng.integers(1, 5))) for _ in range(60)]
    return [conversation(*each, first=rng.integers(VOCAB_SIZE)) for each in ends]


def make_set(folder, conversations, val=(), shard_tokens=10**6):
    kind = "conversations"
    return make_folder(folder, conversations, VOCAB_SIZE, val, shard_tokens, kind=kind)


def expected_row(tokens, answers, seq_len) -> tuple[list[int], list[int]] | None:
    """Compute the row of a conversation in the simplest way; None if no answer fits."""
    fitting = [span for span in answers.tolist() if span[1] <= seq_len + 1]
    if not fitting:
        return None
    row = tokens[: fitting[-1][1]].tolist()
    targets = [IGNORE_INDEX] * len(row)
    for begin, end in fitting:
        targets[begin:end] = row[begin:end]
    return row[:-1], targets[1:]


@pytest.mark.parametrize("shard_tokens", [1, 100, 10**6])
@pytest.mark.parametrize("seq_len", [10, 30, 1000])
def test_a_row_is_a_conversation_up_to_its_last_answer_that_fits(tmp_path, seq_len, shard_tokens):
    conversations = many()
    folder = make_set(tmp_path / "c", conversations, shard_tokens=shard_tokens)
    dataset = ConversationSet(folder, "train", seq_len)
    expected = [expected_row(*each, seq_len) for each in conversations]
    assert dataset.n_left_out == expected.count(None) == 60 - len(dataset)
    assert (dataset.n_left_out > 0) == (seq_len == 10)
    rows = [dataset[i] for i in range(len(dataset))]
    assert [(t.tolist(), y.tolist()) for t, y in rows] == [row for row in expected if row]
    assert {x.dtype for row in rows for x in row} == {torch.int64}
    assert dataset.lengths.tolist() == [len(tokens) for tokens, _ in rows]
    longer = [len(tokens) > seq_len + 1 for tokens, _ in conversations]
    assert dataset.n_cut == sum(longer) - dataset.n_left_out
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_data_without_an_answer_within_the_context_are_refused(tmp_path):
    folder = make_set(tmp_path / "c", [conversation(8, 11)])
    for split in ("train", "val"):
        with pytest.raises(NothingFitsError, match=f"no answer of the {split} split"):
            ConversationSet(folder, split, 9)


def test_data_of_the_other_kind_is_refused(tmp_path):
    chats = make_set(tmp_path / "c", many())
    text = make_folder(tmp_path / "t", [np.arange(40)], VOCAB_SIZE)
    assert f"{chats} holds conversations" in error_of(PackedDataset, chats, "train", 8)
    assert f"{text} holds text" in error_of(ConversationSet, text, "train", 8)


def test_the_identity_depends_on_tokens_and_answers(tmp_path):
    tokens, answers = conversation(3, 7)
    sets = [
        make_set(tmp_path / "a", [(tokens, answers)]),
        make_set(tmp_path / "b", [(tokens, answers)], val=many()),
        make_set(tmp_path / "c", [(tokens + 1, answers)]),
        make_set(tmp_path / "d", [(tokens, answers - [[1, 0]])]),
    ]
    a, b, c, d = (ConversationSet(folder, "train", 8).identity for folder in sets)
    assert a == b
    assert len({a, c, d}) == 3


@pytest.mark.parametrize("seq_len", [30, 80, 1000])
def test_a_row_holds_whole_conversations_one_after_the_other(tmp_path, seq_len):
    """Every conversation that fits stands in exactly one row. The rest of a row does not count."""
    folder = make_set(tmp_path / "c", many())
    alone, rows = (kind(folder, "train", seq_len) for kind in (ConversationSet, ConversationRows))
    pairs = (zip(tokens.tolist(), targets.tolist(), strict=True) for tokens, targets in alone)
    numbers = {tuple(pair): i for i, pair in enumerate(pairs)}
    found = []
    for tokens, targets, starts in rows:
        assert tokens.shape == targets.shape == starts.shape == (seq_len,)
        left, of_row = list(zip(tokens.tolist(), targets.tolist(), strict=True)), []
        while first := next((x for x in numbers if left[: len(x)] == [*x]), None):
            of_row.append(numbers.pop(first))
            at = seq_len - len(left)
            assert starts[at : at + len(first)].tolist() == [at] * len(first)
            left = left[len(first) :]
        assert {target for _, target in left} <= {IGNORE_INDEX}
        found.append(of_row)
    assert not numbers
    assert found == sorted(map(sorted, found))
    assert rows.tokens_per_sample == alone.lengths.sum() / len(rows)
    assert f"packed into {len(rows)} row" in rows.summary
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_pickled_and_moved_data_can_still_be_read(tmp_path):
    folder = make_set(tmp_path / "c", [conversation(500, 20_500)] * 3)
    dataset = ConversationSet(folder, "train", 30_000)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 5000
    copy = pickle.loads(pickled)
    assert all(map(torch.equal, copy[1], dataset[1]))
    folder.rename(tmp_path / "moved")
    assert all(map(torch.equal, dataset[2], copy[2]))


DAMAGE = {
    "truncated": lambda answers: answers[:-1],
    "swapped": lambda answers: answers[:, [0, 2, 1]],
    "beyond": lambda answers: answers + 50,
    "negative": lambda answers: answers - 50,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_answers_are_refused_in_one_line(tmp_path, damage):
    folder = make_set(tmp_path / "c", many())
    path = folder / "train-answers.bin"
    path.write_bytes(damage(np.fromfile(path, "<i8").reshape(-1, 3)).tobytes())
    said = error_of(ConversationSet, folder, "train", 40)
    assert said.startswith(str(folder))
    assert "prepare the data again" in said


def rows_of(lengths, size: int) -> list[list[int]]:
    packed, starts = pack(np.asarray(lengths), size)
    return [part.tolist() for part in np.split(packed, starts[1:-1])]


@pytest.mark.parametrize("lognormal", [(3.5, 0.5, 256), (5.8, 0.8, 1024), (4.8, 0.3, 512)])
def test_rows_hold_each_conversation_once_and_short_conversations_fill_them(lognormal):
    mean, deviation, size = lognormal
    drawn = np.random.default_rng(0).lognormal(mean, deviation, 20_000)
    lengths = drawn.astype(int).clip(1, size)
    rows = rows_of(lengths, size)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert max(lengths[row].sum() for row in rows) <= size
    assert lengths.sum() > 0.98 * len(rows) * size


def test_rows_never_change_and_are_ordered_by_their_first_conversations():
    """If the rows changed, a resumed run would read some conversations twice and miss others."""
    lengths = [7, 2, 8, 1, 3, 5, 3, 2, 4, 1]
    assert rows_of(lengths, 8) == [[0, 3], [1, 7, 8], [2], [4, 9], [5, 6]]
    assert rows_of([8] * 50, 8) == [[i] for i in range(50)]
