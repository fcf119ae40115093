import gzip
import json
import math
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from conftest import VOCAB_SIZE, write_corpus
from small_model import opinionated

from data.dataset import PackedDataset
from data.errors import DataError
from data.packing import PackingOptions, prepare
from data.tokenizer import TOKENIZER_FILE
from evaluation.tasks import detect_task
from formats.portable import save_portable
from scripts.evaluate import main

SEQ_LEN = 32
QUESTIONS = [
    {"question": "sum 4: 1 + 4", "choices": ["= 5", "= 6", "sum"], "answer": 0},
    {"question": "sum", "choices": ["4", "第"], "answer": "B"},
    {"question": "2 + 2 = 4; " * 9, "choices": ["4", "5"], "answer": 1},
]


def write_weights(folder: Path, model: torch.nn.Module, tokenizer: Path) -> None:
    save_portable(folder, model.config, dict(model.named_parameters()))
    shutil.copyfile(tokenizer, folder / TOKENIZER_FILE)


@pytest.fixture(scope="module")
def trained_run(packed, tmp_path_factory) -> Path:
    """A run folder as a finished run leaves it, with a model that was never trained."""
    run = tmp_path_factory.mktemp("runs") / "mine"
    write_weights(run / "weights", opinionated(VOCAB_SIZE, SEQ_LEN), packed / TOKENIZER_FILE)
    settings = {"arguments": {"data": str(packed)}}
    (run / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    return run


@pytest.fixture
def evaluate(trained_run, tmp_path, capfd):
    """Runs the command; returns what it printed and the contents of its JSON file."""

    def evaluate(*flags: str, run: Path = trained_run) -> tuple[str, dict]:
        AcceleratorState._reset_state(reset_partial_state=True)
        written = tmp_path / "result.json"
        main([str(run), "--device", "cpu", "--json", str(written), *map(str, flags)])
        return capfd.readouterr().out, json.loads(written.read_text(encoding="utf-8"))

    yield evaluate
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def refused(evaluate, capfd):
    """The one line with which the command ends."""

    def refused(*flags: str, **where: Path) -> str:
        with pytest.raises(SystemExit) as ended:
            evaluate(*flags, **where)
        assert ended.value.code == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert "Traceback" not in err
        (line,) = [line for line in err.splitlines() if "error:" in line]
        assert line.startswith("evaluate: error: ")
        return line

    return refused


def write_lines(path: Path, lines: list) -> Path:
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def value(result: dict, name: str) -> float:
    return result["metrics"][name]["value"]


def test_without_data_the_validation_split_of_the_run_is_scored(evaluate, packed, trained_run):
    out, result = evaluate()
    dataset = PackedDataset(packed, "val", SEQ_LEN)
    assert (result["task"], result["split"]) == ("packed", "val")
    assert result["data"] == str(packed)
    assert result["model"] == str(trained_run / "weights")
    assert result["sequences"] == len(dataset)
    assert result["tokens"] == len(dataset) * SEQ_LEN
    assert f"{packed}, val split: {result['tokens']:,} tokens" in out


def test_the_block_shows_the_numbers_of_the_json_file(evaluate):
    out, result = evaluate()
    for name, metric in result["metrics"].items():
        assert metric["low"] < metric["value"] < metric["high"], name
    loss = result["metrics"]["loss"]
    assert f" loss: {loss['value']:.4f}  ({loss['low']:.4f} to {loss['high']:.4f})" in out
    accuracy = result["metrics"]["accuracy"]["value"]
    assert f" accuracy: {accuracy:.2%}  (" in out
    assert f"95%, by the spread among {result['units']:,} documents\n" in out
    assert value(result, "perplexity") == pytest.approx(math.exp(loss["value"]))
    assert result["tokens_per_second"] == pytest.approx(result["tokens"] / result["seconds"])


def test_settings_are_recorded(evaluate):
    _, result = evaluate("--batch_size", 3, "--limit", 5)
    for name, expected in {
        "batch_size": 3,
        "limit": 5,
        "dtype": "float32",
        "processes": 1,
        "max_seq_len": SEQ_LEN,
        "sequences": 5,
    }.items():
        assert result[name] == expected, name
    assert "torch" in result["packages"]


def test_the_training_split_and_another_folder_can_be_asked_for(evaluate, packed):
    _, val = evaluate("--data", packed)
    _, train = evaluate("--data", packed, "--split", "train")
    assert train["tokens"] > 5 * val["tokens"]


def test_the_batch_size_does_not_change_the_numbers(evaluate, corpus):
    for data in ((), ("--data", corpus, "--limit", 40)):
        (_, one), (_, many) = (evaluate(*data, "--batch_size", n) for n in (1, 7))
        for name, metric in one["metrics"].items():
            assert many["metrics"][name] == pytest.approx(metric, rel=1e-6), name


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "folder"])
def test_raw_text_is_recognised_whatever_file_it_is_in(evaluate, tmp_path, name):
    text = "sum 3: 1 + 3 = 4; 第三句\n"
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
        (path / "b.txt").write_text(text, encoding="utf-8")
    else:
        write_lines(path, [text if name == "a.txt" else {"text": text}])
    out, result = evaluate("--data", path)
    assert (result["task"], result["units"]) == ("text", 1)
    assert result["bytes"] == len(text.encode())
    assert " bytes in 1 document, windows of " in out
    assert "interval: none, for there are fewer than 3 documents" in out
    assert result["metrics"]["loss"]["low"] is None


def test_the_first_documents_are_taken_and_the_stride_is_half_the_context(evaluate, corpus):
    out, result = evaluate("--data", corpus, "--limit", 20)
    lines = corpus.read_text(encoding="utf-8").splitlines()[:20]
    assert result["bytes"] == sum(len(json.loads(line)["text"].encode()) for line in lines)
    assert (result["units"], result["stride"]) == (20, SEQ_LEN // 2)
    assert f"windows of {SEQ_LEN}, stride {SEQ_LEN // 2}" in out


def test_questions_are_recognised_by_their_first_line(evaluate, tmp_path):
    out, result = evaluate("--data", write_lines(tmp_path / "q.jsonl", QUESTIONS))
    assert (result["task"], result["units"], result["truncated"]) == ("choice", 3, 1)
    assert value(result, "chance") == pytest.approx((1 / 3 + 1 / 2 + 1 / 2) / 3)
    assert 3 * value(result, "acc") in range(4)
    assert f"1 question over {SEQ_LEN} tokens, whose beginning was left out" in out
    assert "chance: 44.44%  what guessing gives" in out


def test_the_delimiter_takes_its_place_in_the_context(evaluate, tmp_path):
    path = write_lines(tmp_path / "q.jsonl", QUESTIONS)
    long = "\n" + "+" * 27
    results = [evaluate("--data", path, *flags)[1] for flags in ((), ("--delimiter", long))]
    assert [result["delimiter"] for result in results] == [" ", long]
    assert [result["truncated"] for result in results] == [1, 2]


def test_the_task_can_be_told(evaluate, tmp_path):
    both = [question | {"text": "sum"} for question in QUESTIONS]
    path = write_lines(tmp_path / "q.jsonl", both)
    assert evaluate("--data", path)[1]["task"] == "choice"
    assert evaluate("--data", path, "--task", "text")[1]["bytes"] == 9


TURNS = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("columns", "task"),
    [
        ({"id": ["1"], "text": ["sum"]}, "text"),
        ({"id": ["1"], "messages": [TURNS]}, "conversations"),
        ({"instruction": ["1?"], "input": [None], "output": ["2"]}, "conversations"),
    ],
)
def test_a_table_is_what_its_columns_say(columns, task, tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path)
    assert detect_task(str(path)) == task
    assert detect_task(str(path), text_column=next(iter(columns))) == "text"


def test_a_table_of_something_else_is_refused_with_what_it_could_have(tmp_path):
    pq.write_table(pa.table({"id": [1], "content": ["x"]}), tmp_path / "a.parquet")
    says = r"a\.parquet: no column is one of text, conversations, .*; it has 'id', 'content'$"
    with pytest.raises(DataError, match=says):
        detect_task(str(tmp_path / "a.parquet"))


def test_bfloat16_is_said_and_close(evaluate):
    _, exact = evaluate()
    out, rounded = evaluate("--dtype", "bfloat16")
    assert "run: bfloat16" in out
    assert value(rounded, "loss") != value(exact, "loss")
    assert value(rounded, "loss") == pytest.approx(value(exact, "loss"), rel=0.02)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--batch_size 0", "--batch_size must be at least 1, not 0"),
        ("--limit -1", "--limit must be at least 0, not -1"),
        ("--stride 0", "--stride must be at least 1, not 0"),
        ("--stride 8", "--stride is for --task text"),
        ("--delimiter :", "--delimiter is for --task choice"),
        ("--delimiter \udcff", "--delimiter '\\udcff' is no text"),
        ("--dtype float16", "--dtype"),
        ("--task poem", "--task"),
        ("--jsn x", "did you mean --json?"),
        ("--num_processes 2", "it belongs to accelerate launch"),
        ("--json /nowhere/x.json", "--json /nowhere/x.json: no file can be written there"),
        ("--data /nowhere", "/nowhere: no such file or folder"),
    ],
)
def test_flags_that_cannot_work_end_in_one_line(refused, flags, says):
    assert says in refused(*flags.split())


@pytest.mark.parametrize(
    ("name", "lines", "says"),
    [
        ("a.jsonl", [], "a.jsonl: an empty file"),
        ("a.txt", [], "a.txt: an empty file"),
        ("a.jsonl", [{"text": ""}], "no document with any text to score"),
        ("a.jsonl", [{"title": "x"}], 'a.jsonl, line 1: neither a "text" nor a "question"'),
        ("a.jsonl", ["[1\n"], "a.jsonl, line 1: not JSON"),
        ("a.jsonl", [{"text": "x"}, {"no": 1}], 'a.jsonl, line 2: no "text"'),
        ("a.jsonl", [*QUESTIONS, {"text": "x"}], 'a.jsonl, line 4: no "question"'),
        ("a.jsonl", [QUESTIONS[0] | {"answer": 3}], 'a.jsonl, line 1: "answer" is 3'),
        ("a.jsonl", [QUESTIONS[0] | {"choices": ["a", ""]}], "a.jsonl, line 1: choice 1 is ''"),
        ("a.tsv", ["x"], "a.tsv: cannot read this kind of file"),
        ("a.csv", ["x"], "a.csv: no column 'text'; --text_column takes one of 'x'"),
    ],
)
def test_data_that_cannot_be_scored_ends_in_one_line(refused, tmp_path, name, lines, says):
    assert says in refused("--data", write_lines(tmp_path / name, lines))


def test_a_name_of_the_text_where_no_file_has_names_is_refused(refused, tmp_path):
    text = write_lines(tmp_path / "a.txt", ["x"])
    said = refused("--data", text, "--text_column", "body")
    assert "--text_column body: none of these files has columns" in said


def test_a_stride_longer_than_the_context_is_refused(refused, corpus):
    line = refused("--data", corpus, "--stride", SEQ_LEN + 1)
    assert f"--stride {SEQ_LEN + 1} leaves tokens out: at most {SEQ_LEN}" in line


def test_data_of_another_tokenizer_is_refused(refused, trained_run, tmp_path):
    options = PackingOptions(VOCAB_SIZE - 1, val_fraction=0.1, workers=1, skip_bad_lines=False)
    out, text = tmp_path / "other", write_corpus(tmp_path / "sums.jsonl")
    prepare([str(text)], out, options, progress=lambda n_bytes: None)
    line = refused("--data", out)
    assert f"{out} was prepared with another tokenizer" in line
    assert f"--tokenizer {trained_run / 'weights' / TOKENIZER_FILE}" in line


def test_a_split_shorter_than_one_sequence_is_refused(refused, corpus, trained_run, tmp_path):
    tokenizer = str(trained_run / "weights" / TOKENIZER_FILE)
    options = PackingOptions(None, 0.0, workers=1, skip_bad_lines=False, tokenizer=tokenizer)
    prepare([str(corpus)], tmp_path / "no_val", options, progress=lambda n_bytes: None)
    line = refused("--data", tmp_path / "no_val")
    assert f"the val split is shorter than a sequence of {SEQ_LEN}" in line


def test_weights_alone_need_data(refused, trained_run, tmp_path):
    shutil.copytree(trained_run / "weights", tmp_path / "alone" / "weights")
    line = refused(run=tmp_path / "alone" / "weights")
    assert line.endswith("does not tell which data it was trained on: give --data")


def test_data_of_the_run_that_is_gone_is_named(refused, trained_run, tmp_path):
    shutil.copytree(trained_run, tmp_path / "run")
    settings = {"arguments": {"data": "out/data/gone"}}
    (tmp_path / "run" / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    assert "out/data/gone, which is not there" in refused(run=tmp_path / "run")


def test_a_wrong_run_is_named(refused, tmp_path):
    assert "nothing: no such folder" in refused(run=tmp_path / "nothing")


@pytest.mark.parametrize("kind", ["packed", "text", "choice"])
def test_broken_weights_are_refused_and_give_no_number(refused, packed, corpus, tmp_path, kind):
    model = opinionated(VOCAB_SIZE, SEQ_LEN)
    model.norm.weight.data.fill_(3e38)  # finite, but what comes out is not
    write_weights(tmp_path / "weights", model, packed / TOKENIZER_FILE)
    questions = write_lines(tmp_path / "q.jsonl", QUESTIONS)
    data = {"packed": packed, "text": corpus, "choice": questions}[kind]
    line = refused("--data", data, run=tmp_path / "weights")
    assert "what the model says is not a number: its weights are broken" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(refused):
    assert "--device cuda: no GPU is visible here" in refused("--device", "cuda")
