"""scripts.evaluate in one process: what it scores, prints, writes and refuses."""

import gzip
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from accelerate.state import AcceleratorState
from conftest import VOCAB_SIZE
from small_model import opinionated, save_model

import scripts.evaluate
from lm.data.dataset import PackedDataset
from lm.data.shards import DESCRIPTION_FILE
from lm.data.tokenizer import TOKENIZER_FILE
from lm.evaluation.tasks import detect_task, split_to_score
from lm.training.validation import validate, validation_loader
from scripts import prepare_data

SEQ_LEN = 32
QUESTIONS = [
    {"question": "sum 4: 1 + 4", "choices": ["= 5", "= 6", "sum"], "answer": 0},
    {"question": "sum", "choices": ["4", "第"], "answer": "B"},
    {"question": "2 + 2 = 4; " * 9, "choices": ["4", "5"], "answer": 1},
]
QUESTIONS.insert(1, QUESTIONS[0])  # a repeated question counts
CHATS = [
    {"prompt": f"{i} + 1 =", "response": str(i + 1) * (30 if i == 4 else 1)} for i in range(2, 12)
]
TURNS = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}]


@pytest.fixture(scope="module")
def run_folder(packed, tmp_path_factory) -> Path:
    """A run folder with only settings.json and the weights of a model that was never trained."""
    run = tmp_path_factory.mktemp("runs") / "mine"
    save_model(run / "weights", opinionated(VOCAB_SIZE, SEQ_LEN), packed)
    settings = {"arguments": {"data": str(packed)}}
    (run / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    return run


@pytest.fixture
def evaluate(accelerator, run_folder, tmp_path, capsys):
    """Runs the command; returns what it printed and the contents of its JSON file."""

    def evaluate(*flags: str | Path | int, runs: tuple[Path, ...] = (run_folder,)):
        AcceleratorState._reset_state(reset_partial_state=True)
        written = tmp_path / "result.json"
        scripts.evaluate.main([*map(str, (*runs, "--device", "cpu", "--json", written, *flags))])
        return capsys.readouterr().out, json.loads(written.read_text(encoding="utf-8"))

    return evaluate


@pytest.fixture
def refused(accelerator, run_folder, refusal):
    """Runs the command, which must fail; returns its error line."""

    def refused(*flags: str | Path | int, run: Path = run_folder) -> str:
        AcceleratorState._reset_state(reset_partial_state=True)
        return refusal(scripts.evaluate, run, "--device", "cpu", *flags)

    return refused


def write_lines(path: Path, lines: list) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def value(result: dict, name: str) -> float:
    return result["metrics"][name]["value"]


@pytest.mark.parametrize("limit", [0, 7])
def test_the_validation_split_is_the_default_data(evaluate, accelerator, packed, run_folder, limit):
    dataset = PackedDataset(packed, "val", SEQ_LEN)
    loader = validation_loader(dataset, 8, limit, accelerator)
    model = opinionated(VOCAB_SIZE, SEQ_LEN)
    loop = validate(model, loader, accelerator, dataset.bytes_per_token)
    out, result = evaluate("--limit", limit, "--batch_size", 3)
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert value(result, name) == pytest.approx(loop[name], rel=1e-6)
    samples = limit or len(dataset)
    expected = {
        **{"model": str(run_folder / "weights"), "data": str(packed), "task": "packed"},
        **{"split": "val", "sequences": samples, "tokens": samples * SEQ_LEN, "limit": limit},
        **{"batch_size": 3, "dtype": "float32", "processes": 1, "max_seq_len": SEQ_LEN},
    }
    assert result.items() >= expected.items()
    assert f"{packed}, val split\n" in out
    assert f"documents, {result['tokens']:,} tokens, {result['bytes']:,} bytes" in out
    if not limit:
        stream = [token for tokens, _ in dataset for token in tokens.tolist()]
        documents = {stream[: i + 1].count(1) for i in range(0, len(stream), SEQ_LEN)}  # 1: bos_id
        assert result["units"] == len(documents) < len(dataset)
    assert f"95%, from the differences among {result['units']:,} documents (at least" in out
    loss = result["metrics"]["loss"]
    assert loss["low"] < loss["value"] < loss["high"]
    assert f" loss: {loss['value']:.4f}  ({loss['low']:.4f} to {loss['high']:.4f})" in out
    assert f" accuracy: {value(result, 'accuracy'):.2%}  " in out


def test_a_folder_of_text_is_scored_with_the_named_column(evaluate, tmp_path):
    text = "<s>sum 3: 1 + 3 = 4; 第三句\n"
    (folder := tmp_path / "texts").mkdir()
    (folder / "a.txt").write_text(text, encoding="utf-8")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps({"body": text}).encode()))
    printed, result = evaluate("--data", folder, "--text_column", "body")
    assert (result["task"], result["units"]) == ("text", 2)
    assert result["bytes"] == 2 * len(text.encode())
    assert "2 with markers as text" in printed
    assert result["metrics"]["loss"]["low"] is None  # too few documents for an interval


def test_of_a_folder_with_splits_validation_is_scored_or_else_test(tmp_path):
    for split in ("test", "train", "val"):
        (tmp_path / f"{split}.txt").touch()
    assert split_to_score(str(tmp_path)) == ("val", [str(tmp_path / "val.txt")])
    (tmp_path / "val.txt").unlink()
    assert split_to_score(str(tmp_path)) == ("test", [str(tmp_path / "test.txt")])


def test_questions_are_scored_with_delimiter_or_template(evaluate, refused, run_folder, tmp_path):
    path = write_lines(tmp_path / "q.jsonl", QUESTIONS)
    out, result = evaluate("--data", path)
    letters = {0: "A", 1: "B", "B": "B"}
    rows = [question | {"answer": letters[question["answer"]]} for question in QUESTIONS]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "q.parquet")
    assert evaluate("--data", tmp_path / "q.parquet")[1]["metrics"] == result["metrics"]
    assert (result["task"], result["units"], result["truncated"]) == ("choice", 4, 1)
    assert (result["template"], result["delimiter"]) == (False, " ")
    assert "scored: 4 questions, 1 truncated" in out
    assert "chance: 41.67%  with random answers" in out
    chats = shutil.copytree(run_folder / "weights", tmp_path / "chats")
    (chats / "chat_template.jinja").write_text("{{ messages }}")
    chat = evaluate("--data", path, runs=(chats,))[1]
    plain = evaluate("--data", path, "--no-template", runs=(chats,))[1]
    assert (chat["template"], plain["template"]) == (True, False)
    assert chat["metrics"] != plain["metrics"] == result["metrics"]
    assert "without the template" in refused("--data", path, "--delimiter", ":", run=chats)


def test_prepared_conversations_and_their_source_give_the_same_loss(evaluate, packed, tmp_path):
    path, out = write_lines(tmp_path / "chat.jsonl", CHATS), tmp_path / "out"
    flags = ["--conversations", path, "--tokenizer", packed / TOKENIZER_FILE, "--out", out]
    prepare_data.main([*map(str, flags), "--val_fraction", "0"])
    _, inputs = evaluate("--data", out, "--split", "train")
    said, text = evaluate("--data", path)
    assert text["metrics"]["loss"] == pytest.approx(inputs["metrics"]["loss"])
    assert (text["cut"], text["left_out"]) == (inputs["cut"], inputs["left_out"]) == (0, 1)
    assert text["tokens"] == inputs["tokens"]
    assert f"9 conversations, {text['tokens']} tokens, " in said
    assert "1 left out" in said


def test_all_models_are_scored_on_the_same_first_documents(evaluate, run_folder, corpus, tmp_path):
    other = shutil.copytree(run_folder / "weights", tmp_path / "other")
    out, results = evaluate("--data", corpus, "--limit", 20, runs=(run_folder, other))
    names = [str(run_folder / "weights"), str(other)]
    assert [result["model"] for result in results] == names
    assert [line.split()[1] for line in out.splitlines() if "model:" in line] == names
    assert results[0]["metrics"] == results[1]["metrics"]
    lines = corpus.read_text(encoding="utf-8").splitlines()[:20]
    assert results[0]["bytes"] == sum(len(json.loads(line)["text"].encode()) for line in lines)
    assert f"how: text, max_seq_len {SEQ_LEN}, stride {SEQ_LEN // 2}" in out


@pytest.mark.parametrize(
    ("content", "text_column", "task"),
    [
        ({"question": "x", "text": "y"}, None, "choice"),
        ({"messages": TURNS, "text": "y"}, None, "text"),
        ({"messages": TURNS, "body": "y"}, "body", "text"),
        ({"instruction": "1?", "output": "2"}, None, "conversations"),
    ],
)
def test_the_first_line_or_row_decides_the_task(content, text_column, task, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [content, {"other": "z"}])
    assert detect_task(str(path), text_column) == task
    pq.write_table(pa.Table.from_pylist([{"id": 1} | content]), tmp_path / "a.parquet")
    assert detect_task(str(tmp_path / "a.parquet"), text_column) == task


@pytest.mark.parametrize(
    ("flags", "lines", "says"),
    [
        ("--batch_size 0", [], "--batch_size: must be a whole number, at least 1, not 0"),
        ("--stride 8", [], "--stride is for --task text"),
        ("--delimiter :", [], "--delimiter is for --task choice"),
        ("--json /nowhere/x.json", [], "--json /nowhere/x.json: no file can be written there"),
        ("--data /nowhere", [], "/nowhere: no such file or folder"),
        ("--data FILE --split val --task conversations", [], "no prepared data here"),
        ("--data FILE --task packed", [], "no prepared data here"),
        (f"--data FILE --stride {SEQ_LEN + 1}", [], f"skips tokens: pass at most {SEQ_LEN}"),
        ("--data FILE", [], "a.jsonl has no text"),
        ("--data FILE --task choice", [], "no text, question, or answer"),
        ("--data FILE", [{"text": "x"}, {"no": 1}], "a.jsonl, line 2: no column 'text'"),
        ("--data FILE", [*QUESTIONS, {"text": "x"}], "a.jsonl, line 5: not a question"),
    ],
)
def test_flags_that_cannot_work_and_bad_data_are_refused_in_one_line(
    refused, tmp_path, flags, lines, says
):
    path = write_lines(tmp_path / "a.jsonl", lines)
    assert says in refused(*flags.replace("FILE", str(path)).split())


def test_data_of_another_tokenizer_is_refused(refused, packed, tmp_path):
    description = Path(shutil.copytree(packed, tmp_path / "other")) / DESCRIPTION_FILE
    content = json.loads(description.read_text(encoding="utf-8")) | {"tokenizer_sha256": "0"}
    description.write_text(json.dumps(content), encoding="utf-8")
    assert "other has another tokenizer" in refused("--data", tmp_path / "other")


def test_weights_without_a_run_need_data_and_broken_weights_are_an_error(refused, packed, tmp_path):
    model = opinionated(VOCAB_SIZE, SEQ_LEN)
    model.norm.weight.data.fill_(3e38)  # finite, but the logits are not
    weights = save_model(tmp_path / "weights", model, packed)
    assert "pass --data" in refused(run=weights)
    line = refused("--data", packed, run=weights)
    assert "the scores are not finite: the weights of the model are broken" in line
