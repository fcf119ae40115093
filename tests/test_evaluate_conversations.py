"""scripts.evaluate on conversations, and on questions asked as turns; several models at once."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from conftest import VOCAB_SIZE
from small_model import opinionated

from data.conversation_set import ConversationSet
from data.conversations import Turn
from data.tokenizer import TOKENIZER_FILE, Tokenizer
from evaluation.conversations import conversation_row, count_answers
from formats.portable import save_portable
from scripts import prepare_data
from scripts.evaluate import main

SEQ_LEN = 48
CHATS = [
    [("user", f"{i} + 1 ="), ("assistant", str(i + 1)), ("user", "?"), ("assistant", "yes " * i)]
    for i in range(2, 20)
]


def write_chats(path: Path, chats: list) -> Path:
    lines = [
        json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]})
        for turns in chats
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_model(folder: Path, packed: Path, *, chats: bool) -> Path:
    model = opinionated(VOCAB_SIZE, SEQ_LEN)
    save_portable(folder, model.config, dict(model.named_parameters()))
    shutil.copyfile(packed / TOKENIZER_FILE, folder / TOKENIZER_FILE)
    if chats:
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def evaluate(tmp_path, capfd):
    """Runs the command; returns what it printed and the contents of its JSON file."""

    def evaluate(*words: str | Path):
        AcceleratorState._reset_state(reset_partial_state=True)
        written = tmp_path / "result.json"
        main([*map(str, words), "--device", "cpu", "--json", str(written)])
        return capfd.readouterr().out, json.loads(written.read_text(encoding="utf-8"))

    yield evaluate
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_a_conversation_is_the_row_that_training_reads(packed, tmp_path):
    path, out = write_chats(tmp_path / "chat.jsonl", CHATS), tmp_path / "out"
    flags = ["--conversations", path, "--tokenizer", packed / TOKENIZER_FILE, "--out", out]
    prepare_data.main([*map(str, flags), "--val_fraction", "0"])
    tokenizer = Tokenizer(packed / TOKENIZER_FILE)
    dataset, lost = ConversationSet(out, "train", SEQ_LEN), 0
    rows = iter(range(len(dataset)))
    for turns in CHATS:
        row = conversation_row(0, [Turn(*turn) for turn in turns], tokenizer, SEQ_LEN)
        if row is None:
            lost += 1
            continue
        tokens, targets = dataset[next(rows)]
        assert torch.equal(row.tokens, tokens)
        assert torch.equal(row.targets, targets)
        answers = [text for role, text in turns if role == "assistant"][: count_answers(targets)]
        assert row.n_bytes == sum(map(len, answers))
    assert next(rows, None) is None
    assert lost == dataset.n_left_out
    assert dataset.n_cut > 0


def test_a_prepared_folder_and_its_text_give_the_same_numbers(evaluate, packed, tmp_path):
    model = write_model(tmp_path / "model", packed, chats=True)
    path, out = write_chats(tmp_path / "chat.jsonl", CHATS), tmp_path / "out"
    flags = ["--conversations", path, "--tokenizer", packed / TOKENIZER_FILE, "--out", out]
    prepare_data.main([*map(str, flags), "--val_fraction", "0"])
    _, prepared = evaluate(model, "--data", out, "--split", "train")
    said, text = evaluate(model, "--data", path)
    for name in ("loss", "perplexity", "accuracy", "bits_per_byte"):
        assert text["metrics"][name]["value"] == pytest.approx(prepared["metrics"][name]["value"])
    assert (text["cut"], text["left_out"]) == (prepared["cut"], prepared["left_out"])
    assert text["tokens"] == prepared["tokens"]
    assert f"tokens of answers in {text['units']} conversations" in said
    assert f"{text['cut']} cut after their last answer" in said


def test_several_models_stand_in_one_table(evaluate, packed, tmp_path):
    path = write_chats(tmp_path / "chat.jsonl", CHATS)
    names = [write_model(tmp_path / name, packed, chats=False) for name in ("base", "tuned")]
    said, results = evaluate(*names, "--data", path)
    assert [result["model"] for result in results] == list(map(str, names))
    data, head, *lines = said.strip().splitlines()
    assert data == str(path)
    assert head.split()[:2] == ["model", "parameters"]
    assert [line.split()[0] for line in lines] == list(map(str, names))
    assert results[0]["metrics"] == results[1]["metrics"]


def test_who_answers_is_asked_in_the_template(evaluate, packed, tmp_path):
    path = tmp_path / "questions.jsonl"
    question = {"question": "1 + 4 =", "choices": ["5", "6"], "answer": 0}
    path.write_text(json.dumps(question) + "\n", encoding="utf-8")
    chats = write_model(tmp_path / "chats", packed, chats=True)
    plain = write_model(tmp_path / "plain", packed, chats=False)
    for model, flags, template in (
        (chats, [], True),
        (plain, [], False),
        (chats, ["--no-template"], False),
        (plain, ["--template"], True),
    ):
        said, result = evaluate(model, "--data", path, *flags)
        assert result["template"] is template
        assert ("as turns" in said) is template


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--split", "val"], "--split is for a prepared folder"),
        (["--template"], "--template is for --task choice"),
        (["--stride", "8"], "--stride is for --task text"),
    ],
)
def test_flags_that_mean_nothing_here_are_refused(evaluate, packed, tmp_path, capfd, flags, says):
    path = write_chats(tmp_path / "chat.jsonl", CHATS)
    model = write_model(tmp_path / "model", packed, chats=True)
    with pytest.raises(SystemExit) as ended:
        evaluate(model, "--data", path, *flags)
    assert ended.value.code == 2
    assert says in capfd.readouterr().err
