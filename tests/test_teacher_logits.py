"""Recorded expectations of a teacher: written once, whole or not there, read by sample."""

import json
import pickle
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_model import opinionated
from test_conversation_set import VOCAB_SIZE, make_set, many
from test_dataset import make_folder, random_documents
from test_import_weights import write_llama

from common.errors import UsageError
from data import teacher_logits as form
from data.conversation_set import ConversationSet
from data.dataset import PackedDataset
from data.errors import DataError
from data.loader import micro_batches
from data.order import MicroBatchSampler
from data.teacher_logits import (
    BEGUN_FILE,
    DESCRIPTION_FILE,
    RecordedSet,
    identity_of,
    record_dtype,
)
from evaluation import teacher_logits
from evaluation.scoring import Scorer
from evaluation.teacher_logits import Recorder, likeliest, summary
from model import IGNORE_INDEX
from scripts.teacher_logits import parse_arguments, record
from training.distillation_loss import distillation_loss
from training.recorded_teacher import Recording

SEQ_LEN, TEMPERATURE = 24, 2.0
KINDS = pytest.mark.parametrize("kind", ["text", "conversations"])


@pytest.fixture
def samples_of(tmp_path):
    """The training split of a kind of data."""

    def open_split(kind: str = "text", seq_len: int = SEQ_LEN):
        folder = tmp_path / kind
        if not folder.exists():
            if kind == "text":
                make_folder(folder, random_documents(VOCAB_SIZE, n=30), VOCAB_SIZE)
            else:
                make_set(folder, many(25))
            described = json.loads((folder / "dataset.json").read_text())
            described["tokenizer_sha256"] = "1" * 64
            (folder / "dataset.json").write_text(json.dumps(described))
        return {"text": PackedDataset}.get(kind, ConversationSet)(folder, "train", seq_len)

    return open_split


@pytest.fixture
def recorder_of(accelerator, samples_of, monkeypatch):
    """Of a tiny teacher; parts are of a few samples, so that there are several."""
    monkeypatch.setattr(teacher_logits, "PART_BYTES", 1 << 11)

    def make(
        kind: str = "text", k: int = 5, temperature: float = TEMPERATURE, teacher="t" * 64, room=0
    ):
        model = opinionated(VOCAB_SIZE + room, SEQ_LEN)
        model.norm.weight.data *= 8
        scorer = Scorer(model, accelerator, batch_size=2)
        return Recorder(scorer, teacher, samples_of(kind), k, temperature)

    return make


def asked_of(recorder: Recorder, **changes) -> dict:
    return {"temperature": TEMPERATURE, "vocab_size": recorder.vocab_size} | changes


def batches_of(recorder: Recorder, out, workers: int = 0):
    """Micro-batches of 3, as training reads them."""
    recorded = RecordedSet(recorder.samples, out, asked_of(recorder))
    sampler = MicroBatchSampler(len(recorded), 3, seed=1)
    return micro_batches(recorded, sampler, workers)


@KINDS
def test_each_target_that_counts_has_what_the_teacher_expects_there(recorder_of, tmp_path, kind):
    recorder = recorder_of(kind)
    description = recorder.record(tmp_path / "out")
    assert len(description["parts"]) > 2
    batches = batches_of(recorder, tmp_path / "out")
    seen = 0
    while seen < len(recorder.samples):
        tokens, targets, recorded = next(batches)
        seen += len(tokens)
        counts = targets != IGNORE_INDEX
        logits = recorder.scorer.model(tokens).logits
        ids, logarithms, _ = likeliest(logits[counts], 5, TEMPERATURE)
        torch.testing.assert_close(
            recorded.log_probabilities[counts].float(), logarithms, rtol=2**-11, atol=1e-4
        )
        # Two that are equally likely but for rounding may change places.
        same = (recorded.ids[counts] == ids).float().mean()
        assert same > 0.99
        assert not recorded.ids[~counts].any()
        assert not recorded.log_probabilities[~counts].any()


def test_room_for_more_pieces_than_the_tokenizer_has_is_not_recorded(recorder_of, tmp_path):
    recorder = recorder_of(k=VOCAB_SIZE, room=7)
    assert recorder.record(tmp_path / "out")["vocab_size"] == VOCAB_SIZE
    tokens, _, recorded = next(batches_of(recorder, tmp_path / "out"))
    logits = recorder.scorer.model(tokens).logits[..., :VOCAB_SIZE]
    _, logarithms, _ = likeliest(logits.flatten(0, 1), VOCAB_SIZE, TEMPERATURE)
    kept = recorded.log_probabilities.flatten(0, 1).float()
    torch.testing.assert_close(kept, logarithms, rtol=2**-11, atol=1e-4)


@KINDS
def test_the_data_are_those_of_training_without_a_teacher(recorder_of, tmp_path, kind):
    recorder = recorder_of(kind)
    recorder.record(tmp_path / "out")
    sampler = MicroBatchSampler(len(recorder.samples), 3, seed=1)
    plain = micro_batches(recorder.samples, sampler, 0)
    recorded = batches_of(recorder, tmp_path / "out", workers=1)
    for _ in range(6):
        expected, (tokens, targets, _) = next(plain), next(recorded)
        assert torch.equal(tokens, expected[0])
        assert torch.equal(targets, expected[1])


@KINDS
@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_k_of_the_whole_vocabulary_gives_the_loss_of_the_teacher_itself(
    recorder_of, tmp_path, kind, kl
):
    recorder = recorder_of(kind, k=VOCAB_SIZE)
    recorder.record(tmp_path / "out")
    tokens, targets, recorded = next(batches_of(recorder, tmp_path / "out"))
    theirs = recorder.scorer.model(tokens).logits
    ours = theirs.roll(1, dims=-1).detach() / 2 + theirs.detach() / 2
    how = {"alpha": 0.5, "temperature": TEMPERATURE, "kl": kl}
    expected, found = (distillation_loss(ours, x, targets, **how) for x in (theirs, recorded))
    assert expected.soft > 0.1
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-3, atol=0)


def test_fewer_pieces_keep_most_of_the_divergence_and_what_is_lost_is_said(recorder_of, tmp_path):
    """A student that finds all other pieces equally likely is told less by just so much."""
    recorder = recorder_of(k=40)
    description = recorder.record(tmp_path / "out")
    ours = torch.zeros(1, SEQ_LEN, VOCAB_SIZE)  # indifferent
    lost = mass = 0.0
    recorded = RecordedSet(recorder.samples, tmp_path / "out", asked_of(recorder))
    for i in range(len(recorded)):
        tokens, targets, kept = recorded.collate([recorded[i]])
        theirs = recorder.scorer.model(tokens).logits.detach()
        how = {"alpha": 0, "temperature": TEMPERATURE, "kl": "forward"}
        dense, sparse = (distillation_loss(ours, x, targets, **how) for x in (theirs, kept))
        lost += (dense.soft - sparse.soft).item() / TEMPERATURE**2
        mass += kept.log_probabilities[..., -1].float().exp().mean().item()
    said = summary(description, recorder.n_targets)
    n = len(recorded)
    assert lost / n > 0.001
    assert f"40 of {VOCAB_SIZE} pieces each: {mass / n:.2%} " in said
    nats = sum(part["nats"] for part in description["parts"]) / recorder.n_targets
    assert nats == pytest.approx(lost / n, abs=2e-4)
    assert f"misses {nats:.4f} nats" in said


@KINDS
def test_what_was_stopped_looks_unfinished_and_goes_on(
    recorder_of, tmp_path, monkeypatch, capsys, kind
):
    recorder_of(kind).record(tmp_path / "whole")
    out, recorder = tmp_path / "out", recorder_of(kind)
    forward, seen = recorder.scorer.model.forward, []

    def fails(tokens):
        seen.append(tokens)
        if len(seen) == 5:
            raise KeyboardInterrupt
        return forward(tokens)

    monkeypatch.setattr(recorder.scorer.model, "forward", fails)
    with pytest.raises(KeyboardInterrupt):
        recorder.record(out)
    n_parts = len(list((tmp_path / "whole").glob("*.bin")))
    done = len(list(out.glob("train-0000[0-9].bin")))
    assert 0 < done < n_parts
    assert (out / BEGUN_FILE).exists()
    assert len(list(out.iterdir())) == done + 1
    what = f"an unfinished recording .{DESCRIPTION_FILE} is missing"
    how = f"TEACHER --data {recorder.samples.folder} --out {out} --k {recorder.k} --max_seq_len "
    with pytest.raises(DataError, match=f"{what}.*{re.escape(how)}"):
        RecordedSet(recorder.samples, out, asked_of(recorder))
    capsys.readouterr()
    again = recorder_of(kind)
    again.record(out)
    assert f"{done} of {n_parts} parts are there already" in capsys.readouterr().out
    for path in (tmp_path / "whole").iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    assert len(list(out.iterdir())) == n_parts + 1


def test_nobody_else_writes_there_meanwhile(recorder_of, tmp_path, monkeypatch):
    recorder, locks = recorder_of(), []
    forward = recorder.scorer.model.forward

    def looks(tokens):
        locks.append((tmp_path / ".out.lock").exists())
        return forward(tokens)

    monkeypatch.setattr(recorder.scorer.model, "forward", looks)
    recorder.record(tmp_path / "out")
    assert set(locks) == {True}
    assert not (tmp_path / ".out.lock").exists()


def test_what_is_finished_is_not_recorded_again(recorder_of, tmp_path, monkeypatch):
    recorder = recorder_of()
    expected = recorder.record(tmp_path / "out")
    monkeypatch.setattr(recorder.scorer.model, "forward", None)
    assert recorder.record(tmp_path / "out") == expected


def test_another_recording_is_replaced_only_where_that_is_asked_for(recorder_of, tmp_path):
    out = tmp_path / "out"
    first = identity_of(recorder_of().record(out))
    for other, said in (
        (recorder_of(k=6), "--k 5 there, 6 here"),
        (recorder_of(temperature=1.0), "--temperature 2.0 there, 1.0 here"),
        (recorder_of(teacher="u" * 64), f"teacher {'t' * 64} there, {'u' * 64} here"),
        (recorder_of("conversations"), "data "),
    ):
        with pytest.raises(UsageError, match=f"is another recording .*{said}.*--overwrite"):
            other.record(out)
    other = recorder_of(k=6)
    assert identity_of(other.record(out, overwrite=True)) != first
    assert RecordedSet(other.samples, out, asked_of(other)).k == 6


def test_every_process_names_the_recording_that_it_reads(recorder_of, tmp_path):
    """What the main process has found is told to all, and another machine may have another."""
    out = tmp_path / "out"
    found = Recording(out, TEMPERATURE, recorder_of().record(out))
    assert found.sha256() == identity_of(found.description)
    there = recorder_of(k=6).record(out, overwrite=True)
    assert found.sha256() == identity_of(there) != identity_of(found.description)


def test_of_a_hugging_face_folder_nothing_tells_how_long_a_students_sequences_are(tmp_path):
    llama = write_llama(tmp_path / "llama")
    with pytest.raises(
        UsageError, match=r"--max_seq_len is missing, .* the 64 tokens that .*llama"
    ):
        record(parse_arguments([str(llama), "--data", str(tmp_path / "nowhere")]))


def recorded_at(recorder: Recorder, out) -> tuple:
    recorder.record(out)
    return out, asked_of(recorder)


def test_a_folder_of_something_else_is_not_written_into(recorder_of, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("out", "file"):
        with pytest.raises(UsageError, match=f"{name} exists and is no recording of a teacher"):
            recorder_of().record(tmp_path / name, overwrite=True)
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("k", [0, -1, VOCAB_SIZE + 1])
def test_a_k_that_cannot_be_is_refused(recorder_of, k):
    with pytest.raises(UsageError, match=f"--k must be from 1 to {VOCAB_SIZE}, the pieces, not"):
        recorder_of(k=k)


def test_a_disk_with_too_little_room_is_said_before_anything_is_written(
    recorder_of, tmp_path, monkeypatch, capsys
):
    recorder = recorder_of()
    n_bytes = recorder.n_targets * (5 * 2 + 6 * 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=n_bytes - 1))
    with pytest.raises(UsageError, match=r"22 bytes for each of [\d,]+ targets, and .* are free"):
        recorder.record(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=n_bytes))
    recorder.record(tmp_path / "out")
    written = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.bin"))
    assert written == n_bytes
    assert f"{n_bytes / 1e3:.1f} kB, 22 bytes" in capsys.readouterr().out


def test_weights_that_are_no_numbers_are_not_recorded(recorder_of, tmp_path):
    recorder = recorder_of()
    recorder.scorer.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(UsageError, match="what the teacher says is not a number"):
        recorder.record(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.bin"))


def test_what_was_recorded_for_something_else_is_refused_in_words(
    recorder_of, samples_of, tmp_path
):
    recorder = recorder_of()
    out, asked = recorded_at(recorder, tmp_path / "out")
    other_data = samples_of("conversations")
    other_tokenizer = samples_of()
    other_tokenizer.description = other_tokenizer.description | {"tokenizer_sha256": "2" * 64}
    for samples, wanted, said in (
        (recorder.samples, asked | {"temperature": 1.0}, "--temperature 2.0 there, 1.0 here"),
        (recorder.samples, asked | {"vocab_size": 9}, f"vocab_size {VOCAB_SIZE} there, 9 here"),
        (samples_of(seq_len=12), asked, "--max_seq_len 24 there, 12 here"),
        (other_data, asked, f"there, {other_data.identity} here"),
        (other_tokenizer, asked, f"there, {'2' * 16} here"),
    ):
        of = recorder.samples.folder
        with pytest.raises(DataError, match=f"out, a recording of {of}, is for .*{said}"):
            RecordedSet(samples, out, wanted)
    with pytest.raises(
        DataError, match=r"no recording of a teacher .* python -m scripts.teacher_logits"
    ):
        RecordedSet(recorder.samples, tmp_path / "nowhere", asked)


@pytest.mark.parametrize(
    "damage", ["missing", "cut short", "format", "junk", "no parts", "other parts", "k", "folder"]
)
def test_damage_is_one_line(recorder_of, tmp_path, damage):
    recorder = recorder_of()
    out, asked = recorded_at(recorder, tmp_path / "out")
    part, described = out / "train-00001.bin", out / DESCRIPTION_FILE
    content = json.loads(described.read_text())
    match damage:
        case "missing":
            part.unlink()
        case "cut short":
            part.write_bytes(part.read_bytes()[:-1])
        case "format":
            described.write_text(json.dumps(content | {"format": 9}))
        case "junk":
            described.write_text("[1, 2")
        case "no parts":
            described.write_text(json.dumps(content | {"parts": 3}))
        case "other parts":
            described.write_text(json.dumps(content | {"parts": content["parts"][:1]}))
        case "k":
            described.write_text(json.dumps(content | {"k": "five"}))
        case "folder":
            described.write_text(json.dumps(content | {"folder": 7}))
    with pytest.raises(DataError) as refused:
        RecordedSet(recorder.samples, out, asked)
    assert str(out) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("damage", ["an id", "zeros", "no number", "other bytes"])
def test_records_that_are_no_probabilities_of_pieces_are_refused(recorder_of, tmp_path, damage):
    recorder = recorder_of()
    out, asked = recorded_at(recorder, tmp_path / "out")
    path = out / "train-00000.bin"
    records = np.fromfile(path, record_dtype(VOCAB_SIZE, 5))
    match damage:
        case "an id":
            records["ids"][3] = VOCAB_SIZE
        case "zeros":  # what a file system may leave
            records[3] = 0
        case "no number":
            records["log_probabilities"][3, 2] = np.nan
        case "other bytes":
            records["log_probabilities"][3] = records["log_probabilities"][3, ::-1] / 2
    records.tofile(path)
    recorded = RecordedSet(recorder.samples, out, asked)
    with pytest.raises(DataError, match=f"train-00000.bin is damaged: {form.AGAIN}"):
        recorded[0]


@pytest.mark.parametrize("damage", ["missing", "cut short", "another byte"])
def test_to_record_again_mends_what_is_damaged(recorder_of, tmp_path, capsys, damage):
    recorder = recorder_of()
    out, _ = recorded_at(recorder, tmp_path / "out")
    path, whole = out / "train-00001.bin", (out / "train-00001.bin").read_bytes()
    match damage:
        case "missing":
            path.unlink()
        case "cut short":
            path.write_bytes(whole[:-1])
        case "another byte":
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    described = (out / DESCRIPTION_FILE).read_bytes()
    recorder.record(out)
    assert f"{path}: missing or damaged, written again" in capsys.readouterr().out
    assert path.read_bytes() == whole
    assert (out / DESCRIPTION_FILE).read_bytes() == described
    assert not (out / BEGUN_FILE).exists()


def test_pickling_does_not_carry_the_records_and_moved_ones_are_still_read(recorder_of, tmp_path):
    recorder = recorder_of()
    out, asked = recorded_at(recorder, tmp_path / "out")
    recorded = RecordedSet(recorder.samples, out, asked)
    assert len(pickle.dumps(recorded)) < 20_000
    expected = recorded[4][1]
    assert (pickle.loads(pickle.dumps(recorded))[4][1] == expected).all()
    out.rename(tmp_path / "moved")
    assert (recorded[4][1] == expected).all()


@pytest.mark.parametrize(("vocab_size", "k", "n_bytes"), [(6400, 64, 258), (70_000, 64, 386)])
def test_a_target_takes_so_many_bytes(vocab_size, k, n_bytes):
    assert record_dtype(vocab_size, k).itemsize == n_bytes
    assert record_dtype(k, k).itemsize == 4 * k
    assert 1000 * n_bytes < form.PART_BYTES
