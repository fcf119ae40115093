import csv
import gzip
import json
import os
import random
import shutil
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import write_corpus

from data.corpus import find_files
from data.prepared import default_out
from data.shards import read_description
from scripts import prepare_data
from scripts.prepare_data import main

SMALL = ["--vocab_size", "300", "--workers", "1", "--segmentations", "1"]


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """An empty folder with a small corpus, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "sums.jsonl", 60)
    return tmp_path


def contents(folder) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def refused(capfd, *flags: str, usual=SMALL) -> str:
    """The one line with which these flags, or this data, end the command."""
    with pytest.raises(SystemExit) as ended:
        main([*usual, *flags])
    assert ended.value.code == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "Traceback" not in err
    lines = err.replace("\r", "\n").splitlines()
    errors = [line for line in lines if "prepare_data: error: " in line]
    assert errors == lines[-1:]
    return errors[0]


def test_data_goes_to_a_folder_of_its_name_by_default(workplace, capsys):
    main([*SMALL, "--data", "sums.jsonl"])
    description = read_description(workplace / "out" / "data" / "sums")
    documents = sum(split["documents"] for split in description["splits"].values())
    assert documents == 60
    assert description["vocab_size"] == 300
    printed = capsys.readouterr().out
    assert printed.startswith(f"{Path('out/data/sums')}: ")
    for name, split in description["splits"].items():
        assert (
            f"{name:5} {split['documents']:>9,} documents {split['tokens']:>13,} tokens" in printed
        )


def test_what_another_process_has_prepared_meanwhile_is_taken(workplace, capsys, monkeypatch):
    turns = []

    @contextmanager
    def after_another(out: Path):
        turns.append(out)
        if len(turns) == 1:
            main([*SMALL, "--data", "sums.jsonl"])
        yield

    monkeypatch.setattr(prepare_data, "one_at_a_time", after_another)
    main([*SMALL, "--data", "sums.jsonl"])
    assert turns == [Path("out/data/sums")] * 2
    printed = capsys.readouterr().out
    assert printed.count("bytes per token") == 1
    assert printed.endswith("sums: already prepared from this text\n")
    main([*SMALL, "--data", "sums.jsonl"])  # for which nobody has to write, or wait
    assert len(turns) == 2


def test_a_text_without_a_validation_document_is_told_so(workplace, capsys):
    line = "".join(f"{a} + {a} = {2 * a}\n" for a in range(70))
    Path("short.txt").write_text(line)
    main(["--workers", "1", "--data", "short.txt"])
    printed = capsys.readouterr().out
    assert "    1 document " in printed
    assert "WARNING: no validation document: that takes two different documents" in printed
    assert "a .txt under 1 KiB is one document" in printed
    assert f"short: {len(line) / 1000:.1f} kB of text in " in printed
    for enough in (["--data", "sums.jsonl"], ["--data", "short.txt", "--val_fraction", "0"]):
        main([*SMALL, *enough, "--overwrite"])
        assert "no validation document" not in capsys.readouterr().out


def test_of_a_folder_it_is_said_how_many_files_were_read(workplace, capsys):
    (workplace / "texts" / "deeper").mkdir(parents=True)
    shutil.move("sums.jsonl", "texts/deeper/sums.jsonl")
    for name in ("a.pdf", "b.md"):
        Path("texts", name).write_text("of another kind")
    main([*SMALL, "--data", "texts"])
    kinds = ".txt, .jsonl, .jsonl.gz, .jsonl.zst, .csv, .parquet"
    assert f"texts: 1 file read ({kinds}), 2 left out\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("builtin", "builtin"),
        ("/a/b/c.jsonl", "c"),
        ("/a/b/c.jsonl.gz", "c"),
        ("c.txt", "c"),
        ("c.jsonl.zst", "c"),
        ("c.parquet", "c"),
        ("/a/v1.5.jsonl", "v1.5"),
        ("/a/folder/", "folder"),
        ("/a/folder/.", "folder"),
    ],
)
def test_the_default_folder_is_named_after_the_data(data, name):
    assert default_out(data) == Path("out/data") / name


def test_the_default_folder_of_the_working_folder_has_its_name(workplace):
    assert default_out(".") == Path("out/data") / workplace.name


def test_it_can_be_written_elsewhere(workplace):
    main([*SMALL, "--data", "sums.jsonl", "--out", "some/where"])
    read_description(workplace / "some" / "where")
    assert not (workplace / "out").exists()


def test_a_second_call_finds_the_data_prepared_and_changes_nothing(workplace, capsys):
    main([*SMALL, "--data", "sums.jsonl"])
    before = contents("out")
    stamps = {path: os.stat(path).st_mtime_ns for path in before}
    capsys.readouterr()
    for more in ([], ["--overwrite"], ["--workers", "2"]):
        main([*SMALL, "--data", "sums.jsonl", *more])
        assert capsys.readouterr().out == "out/data/sums: already prepared from this text\n"
    assert contents("out") == before
    assert {path: os.stat(path).st_mtime_ns for path in before} == stamps


CHANGES = {
    "other text": lambda: write_corpus(Path("sums.jsonl"), 70) and [],
    "another vocabulary": lambda: ["--vocab_size", "310"],
    "another share": lambda: ["--val_fraction", "0.3"],
    "bad lines skipped": lambda: ["--skip_bad_lines"],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_other_text_or_settings_replace_what_is_there_only_when_told_to(workplace, capfd, change):
    main([*SMALL, "--data", "sums.jsonl"])
    before = contents("out")
    capfd.readouterr()
    flags = ["--data", "sums.jsonl", *change()]
    line = refused(capfd, *flags)
    assert "out/data/sums was prepared from other text or with other settings" in line
    assert "--overwrite" in line
    assert "--out" in line
    assert contents("out") == before

    main([*SMALL, *flags, "--overwrite"])
    assert contents("out") != before
    assert "already" not in capfd.readouterr().out
    main([*SMALL, *flags])
    assert "already prepared" in capfd.readouterr().out


def test_another_name_of_the_text_is_another_setting(workplace, capfd):
    rows = ({"text": f"{i} {i * i}\n" * 20, "other": f"{i} {i + i}\n" * 20} for i in range(60))
    Path("two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main([*SMALL, "--data", "two.jsonl"])
    before = contents("out")
    capfd.readouterr()
    flags = ["--data", "two.jsonl", "--text_column", "other"]
    assert "with other settings" in refused(capfd, *flags)
    main([*SMALL, *flags, "--overwrite"])
    assert contents("out")["out/data/two/train-00000.bin"] != before["out/data/two/train-00000.bin"]


def test_a_name_of_the_text_where_no_file_has_names_is_refused(workplace, capfd):
    Path("plain.txt").write_text("1 2 3\n" * 100, encoding="utf-8")
    said = refused(capfd, "--data", "plain.txt", "--text_column", "body")
    assert "--text_column body: none of these files has columns, as .jsonl" in said
    assert not Path("out/data/plain").exists()


def test_data_prepared_before_the_text_could_have_another_name_is_found_prepared(workplace, capsys):
    main([*SMALL, "--data", "sums.jsonl"])
    path = Path("out/data/sums/dataset.json")
    description = json.loads(path.read_text(encoding="utf-8"))
    del description["prepared_from"]["text_column"]
    path.write_text(json.dumps(description), encoding="utf-8")
    capsys.readouterr()
    main([*SMALL, "--data", "sums.jsonl"])
    assert capsys.readouterr().out == "out/data/sums: already prepared from this text\n"


def test_what_is_chosen_by_the_size_of_the_text_is_said_in_one_line(workplace, capsys):
    Path("lines.txt").write_text("".join(f"{i} {i * i}\n" for i in range(5000)))
    main(["--data", "lines.txt", "--workers", "1"])
    description = read_description("out/data/lines")
    assert description["vocab_size"] == 512
    splits = description["splits"]
    in_training = splits["train"]["documents"] // 7
    documents = in_training + splits["val"]["documents"]
    assert documents == pytest.approx(os.path.getsize("lines.txt") / 1024, rel=0.05)
    assert splits["val"]["documents"] == pytest.approx(documents / 10, rel=0.5)
    assert splits["val"]["documents"] > 1
    line = (
        "  by the size of the text: a vocabulary of 512 at most (--vocab_size), 10% for validation "
        "(--val_fraction), 7 ways to cut a document into pieces (--segmentations), long files cut "
        "into documents of 1 KiB"
    )
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == line
    (train,) = [line for line in said if line.startswith("  train")]
    assert train.split()[1:3] == [f"{in_training:,}", "documents"]
    assert train.endswith("tokens, each document cut in 7 ways")
    n_bytes = os.path.getsize("lines.txt")
    assert splits["val"]["bytes"] + splits["train"]["bytes"] / 7 == n_bytes


def test_flags_win_over_what_the_size_would_choose(workplace, capsys):
    Path("lines.txt").write_text("".join(f"{i} {i * i}\n" for i in range(5000)))
    main([*SMALL, "--data", "lines.txt", "--val_fraction", "0"])
    description = read_description("out/data/lines")
    assert description["vocab_size"] == 300
    assert description["splits"]["val"]["documents"] == 0
    said = capsys.readouterr().out
    assert "by the size of the text: long files cut" in said


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.jsonl.zst"])
def test_every_kind_of_file_gives_the_same_shards(workplace, name):
    lines = Path("sums.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    documents = [json.loads(line)["text"] for line in lines]
    if name == "a.csv":
        with open(name, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["id", "body"], *enumerate(documents)])
    elif name == "a.parquet":
        pq.write_table(pa.table({"id": range(60), "body": documents}), name)
    else:
        renamed = "".join(json.dumps({"body": text}) + "\n" for text in documents)
        Path(name).write_bytes(zstandard.compress(renamed.encode()))
    model = "out/data/sums/tokenizer.model"  # a sample of a text depends on the form of its file
    main([*SMALL, "--data", "sums.jsonl"])
    main(
        [
            "--data",
            name,
            "--text_column",
            "body",
            "--tokenizer",
            model,
            *SMALL[2:],
            "--val_fraction",
            "0.1",
        ]
    )
    assert read_description("out/data/a")["splits"] == read_description("out/data/sums")["splits"]


def test_bad_rows_of_a_table_are_skipped_when_told_to_and_counted(workplace, capfd):
    texts = [None if i in (5, 20) else f"{i} and {i * i}, {i * i * i}" for i in range(60)]
    pq.write_table(pa.table({"text": texts}), "a.parquet")
    line = refused(capfd, "--data", "a.parquet")
    assert "a.parquet, row 6: null and no text; --skip_bad_lines counts such documents" in line
    main([*SMALL, "--data", "a.parquet", "--skip_bad_lines"])
    assert "skipped 2 bad documents, the first: a.parquet, row 6" in capfd.readouterr().out


def test_a_column_that_is_not_there_ends_in_one_line_with_those_that_are(workplace, capfd):
    Path("a.csv").write_text("id,body\n1,x\n")
    line = refused(capfd, "--data", "a.csv")
    assert "a.csv: no column 'text'; --text_column takes one of 'id', 'body'" in line


def test_damaged_data_is_not_taken_for_prepared(workplace, capfd):
    main([*SMALL, "--data", "sums.jsonl"])
    shard = Path("out/data/sums/train-00000.bin")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    capfd.readouterr()
    assert "--overwrite" in refused(capfd, "--data", "sums.jsonl")
    main([*SMALL, "--data", "sums.jsonl", "--overwrite"])
    assert shard.read_bytes() == whole


def test_data_without_its_tokenizer_is_not_taken_for_prepared(workplace, capfd):
    main([*SMALL, "--data", "sums.jsonl"])
    Path("out/data/sums/tokenizer.model").unlink()
    capfd.readouterr()
    assert "--overwrite" in refused(capfd, "--data", "sums.jsonl")


def test_another_tokenizer_under_the_same_name_is_noticed(workplace, capfd):
    for vocab_size in ("300", "310"):
        main(
            [
                "--data",
                "sums.jsonl",
                "--workers",
                "1",
                "--vocab_size",
                vocab_size,
                "--out",
                vocab_size,
            ]
        )
    shutil.copy("300/tokenizer.model", "t.model")
    flags = ["--data", "sums.jsonl", "--out", "o", "--tokenizer", "t.model"]
    main([*SMALL, *flags])
    shutil.copy("310/tokenizer.model", "t.model")
    capfd.readouterr()
    assert "--overwrite" in refused(capfd, *flags)


def test_a_folder_that_is_no_prepared_data_is_left_alone(workplace, capfd):
    (workplace / "mine").mkdir()
    (workplace / "mine" / "thesis.txt").write_text("years of work")
    line = refused(capfd, "--data", "sums.jsonl", "--out", "mine")
    assert "mine exists and is no prepared data" in line
    assert (workplace / "mine" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("flag", ["--ou", "--dat", "--conv", "--to"])
def test_no_flag_is_abbreviated(workplace, capfd, flag):
    line = refused(capfd, flag, "sums.jsonl")
    assert f"unrecognized argument {flag}" in line


def test_the_text_itself_is_never_overwritten(workplace, capfd):
    folder = workplace / "text"
    folder.mkdir()
    shutil.move("sums.jsonl", folder / "sums.jsonl")
    before = contents(folder)
    refused(capfd, "--data", "text", "--out", "text", "--overwrite")
    assert contents(folder) == before


def test_a_file_in_the_place_of_the_folder_can_be_replaced_when_told_to(workplace, capfd):
    Path("there").write_text("a file")
    flags = ["--data", "sums.jsonl", "--out", "there"]
    assert "there exists" in refused(capfd, *flags)
    main([*SMALL, *flags, "--overwrite"])
    read_description("there")
    assert sorted(os.listdir()) == ["sums.jsonl", "there"]


def write_bad(path: str, data: bytes) -> str:
    Path(path).write_bytes(data)
    return path


def many_lines() -> bytes:
    chooser = random.Random(0)
    return b"".join(b'{"text": "%d"}\n' % chooser.randrange(10**9) for _ in range(1000))


GOOD_LINE = b'{"text": "good"}\n'
BAD_INPUTS = {
    "no such file": (lambda: "nowhere.jsonl", ["nowhere.jsonl", "no such file"]),
    "another kind of file": (lambda: write_bad("a.pdf", b"%PDF"), ["a.pdf", ".jsonl"]),
    "an empty folder": (lambda: os.mkdir("empty") or "empty", ["empty", "no .txt"]),
    "an empty file": (lambda: write_bad("a.jsonl", b""), ["text"]),
    "no JSON": (lambda: write_bad("a.jsonl", GOOD_LINE * 3 + b"{\n"), ["a.jsonl, line 4"]),
    "no text": (lambda: write_bad("a.jsonl", GOOD_LINE + b"{}\n"), ["a.jsonl, line 2", '"text"']),
    "invalid UTF-8": (
        lambda: write_bad("a.txt", b"abc\xff"),
        ["a.txt, byte 3: ", "UTF-8", "iconv"],
    ),
    "cut gzip": (
        lambda: write_bad("a.jsonl.gz", gzip.compress(many_lines())[:3000]),
        ["a.jsonl.gz", "cannot be read"],
    ),
    "no gzip": (lambda: write_bad("a.jsonl.gz", GOOD_LINE), ["a.jsonl.gz", "cannot be read"]),
    "too little text": (lambda: write_bad("a.txt", b"abc"), ["--vocab_size"]),
    "too long a name": (lambda: "x" * 300 + ".txt", ["x" * 300]),
}


@pytest.mark.parametrize(("data", "expected"), BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_bad_data_ends_with_one_line_and_leaves_nothing(workplace, capfd, data, expected):
    path = data()
    before = sorted(os.listdir())
    line = refused(capfd, "--data", path, "--out", "o")
    assert all(words in line for words in expected)
    assert sorted(os.listdir()) == before


NONSENSE = {
    "vocabulary of nothing": (["--vocab_size", "0"], "vocab_size 0"),
    "negative vocabulary": (["--vocab_size", "-1"], "vocab_size -1"),
    "vocabulary without room": (["--vocab_size", "256"], "vocab_size 256"),
    "enormous vocabulary": (["--vocab_size", "1000000000000"], "1000000000000"),
    "vocabulary in words": (["--vocab_size", "many"], "--vocab_size"),
    "half a piece": (["--vocab_size", "300.5"], "--vocab_size"),
    "negative share": (["--val_fraction", "-0.1"], "--val_fraction"),
    "everything for validation": (["--val_fraction", "1"], "--val_fraction"),
    "share that is no number": (["--val_fraction", "nan"], "--val_fraction"),
    "no way to cut": (["--segmentations", "0"], "--segmentations"),
    "no workers": (["--workers", "0"], "--workers"),
    "negative workers": (["--workers", "-3"], "--workers"),
    "unknown flag": (["--seed", "3"], "--seed"),
    "no such tokenizer": (["--tokenizer", "nowhere.model"], "nowhere.model"),
    "tokenizer that is text": (["--tokenizer", "sums.jsonl"], "sums.jsonl"),
    "tokenizer that is a folder": (["--tokenizer", "."], "tokenizer"),
    "output below a file": (["--out", "sums.jsonl/o"], "sums.jsonl"),
    "the working folder as output": (["--out", ".", "--overwrite"], "--out"),
    "output of too long a name": (["--out", "x" * 300], "xxx"),
}


@pytest.mark.parametrize(("flags", "expected"), NONSENSE.values(), ids=NONSENSE)
def test_nonsense_flags_end_with_one_line_that_names_them(workplace, capfd, flags, expected):
    line = refused(capfd, "--data", "sums.jsonl", *flags)
    assert expected in line
    left = [path for path in Path().rglob("*") if path.is_file()]
    assert left == [Path("sums.jsonl")]


def test_bad_lines_are_skipped_when_told_to_and_reported(workplace, capsys):
    with open("sums.jsonl", "ab") as file:
        file.write(b"{broken\n" + GOOD_LINE)
    main([*SMALL, "--data", "sums.jsonl", "--skip_bad_lines"])
    printed = capsys.readouterr().out
    assert "skipped 1 bad document, the first: " in printed
    assert "sums.jsonl, line 61: not JSON" in printed
    description = read_description("out/data/sums")
    assert sum(split["documents"] for split in description["splits"].values()) == 61


def test_a_tokenizer_of_another_corpus_can_be_used(workplace, capsys):
    main([*SMALL, "--data", "sums.jsonl"])
    Path("b.txt").write_text("4 + 5 = 9\n" * 100)
    main(["--data", "b.txt", "--workers", "1", "--tokenizer", "out/data/sums/tokenizer.model"])
    models = [Path(f"out/data/{name}/tokenizer.model").read_bytes() for name in ("sums", "b")]
    assert models[0] == models[1]
    assert read_description("out/data/b")["vocab_size"] == 300


def test_the_description_says_what_it_was_prepared_from(workplace):
    main([*SMALL, "--data", "sums.jsonl", "--val_fraction", "0.3"])
    source = json.loads(Path("out/data/sums/dataset.json").read_text(encoding="utf-8"))[
        "prepared_from"
    ]
    assert source["files"] == 1
    assert source["bytes_on_disk"] == os.path.getsize("sums.jsonl")
    assert (source["vocab_size"], source["val_fraction"]) == (300, 0.3)


def test_data_prepared_in_another_way_has_a_folder_of_its_own():
    plain, small = default_out("my.jsonl"), default_out("my.jsonl", "--vocab_size 2000")
    assert plain == Path("out/data/my")
    assert small.parent == plain.parent
    assert small.name.startswith("my-")
    assert small == default_out("my.jsonl", "  --vocab_size   2000 ")
    assert small != default_out("my.jsonl", "--vocab_size 3000")


CHAT = [{"prompt": f"{i} + {i}?", "response": f"{i + i}"} for i in range(60)]


@pytest.fixture
def chats(workplace, packed) -> list[str]:
    """Conversations in a file, and the flags that prepare them."""
    text = "".join(json.dumps(row) + "\n" for row in CHAT)
    Path("sums-of-two.jsonl").write_text(text, encoding="utf-8")
    model = str(packed / "tokenizer.model")
    flags = ["--conversations", "sums-of-two.jsonl", "--tokenizer", model, "--val_fraction", "0.1"]
    return [*flags, "--workers", "1"]


def test_conversations_go_to_a_folder_of_their_own_and_are_found_there_again(chats, capsys):
    main(chats)
    description = read_description("out/data/sums-of-two-chat")
    splits = description["splits"]
    assert splits["train"]["documents"] + splits["val"]["documents"] == 60
    n_bytes = sum(split["bytes"] for split in splits.values())
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"out/data/sums-of-two-chat: {n_bytes / 1e3:.1f} kB of answers in")
    for line, (name, split) in zip(printed[1:], splits.items(), strict=False):
        assert line.split()[:3] == [name, str(split["documents"]), "conversations"]
        assert line.endswith(
            f"{split['tokens']:,} tokens, {split['answers']['tokens']} of them in answers"
        )
    main(chats)
    assert capsys.readouterr().out == (
        "out/data/sums-of-two-chat: already prepared from this text\n"
    )


def test_a_share_of_conversations_is_another_setting_and_says_what_is_left(chats, capfd):
    main(chats)
    capfd.readouterr()
    assert "with other settings" in refused(capfd, "--data_split", "2,4,4", usual=chats)
    main([*chats, "--data_split", "2,4,4", "--overwrite"])
    splits = read_description("out/data/sums-of-two-chat")["splits"]
    left = 60 - sum(split["documents"] for split in splits.values())
    assert 40 < left < 56
    said = capfd.readouterr().out
    assert f"  {left} conversations left to other stages of training (--data_split)" in said


def test_the_built_in_conversations_are_prepared_by_name(chats, capsys, monkeypatch):
    files = [path for path in find_files("builtin") if "/json/" in path]
    monkeypatch.setattr(prepare_data, "find_files", lambda source, suffixes: files)
    main(["--conversations", "builtin", *chats[2:4], "--workers", "1"])
    description = read_description("out/data/builtin-chat")
    assert sum(split["documents"] for split in description["splits"].values()) > 5
    assert (
        "by the size of the text: 10% for validation (--val_fraction)\n" in capsys.readouterr().out
    )


WITH_CHATS = {
    "text beside them": (["--data", "sums.jsonl"], "--data is for text"),
    "a vocabulary": (["--vocab_size", "300"], "--vocab_size is for text"),
    "a column": (["--text_column", "a"], "--text_column is for text"),
    "ways to cut": (["--segmentations", "2"], "--segmentations is for text"),
    "shares of nothing": (["--data_split", "0,1"], "--data_split must be shares, as in 2,4,4, not"),
    "shares in words": (["--data_split", "all"], "not all"),
    "no such file": (["--conversations", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    "text": (["--conversations", "sums.jsonl"], "sums.jsonl, line 1: no conversation, which has"),
    "no tokenizer file": (["--tokenizer", "nowhere.model"], "nowhere.model"),
}


@pytest.mark.parametrize(("flags", "expected"), WITH_CHATS.values(), ids=WITH_CHATS)
def test_nonsense_with_conversations_ends_with_one_line(chats, capfd, flags, expected):
    assert expected in refused(capfd, *flags, usual=chats)
    assert not Path("out").exists() or not list(Path("out/data").iterdir())


def test_conversations_take_a_tokenizer_and_text_no_shares(chats, capfd):
    assert "pass --tokenizer" in refused(capfd, usual=chats[:2])
    assert "--data_split is for --conv" in refused(capfd, "--data_split", "1,1")
