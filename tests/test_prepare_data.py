import json
import random
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import write_corpus
from sentencepiece.sentencepiece_model_pb2 import TrainerSpec
from test_tokenizer_json import changed, set_field

from lm.data.prepare import default_out
from lm.data.shards import read_description
from scripts import prepare_data
from scripts.prepare_data import main

SMALL = ["--vocab_size", "300", "--workers", "1", "--segmentations", "1"]


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """A folder with only a small corpus. The command runs in this folder."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "sums.jsonl", 60)
    return tmp_path


def contents(folder) -> dict[str, bytes]:
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in paths if path.suffix != ".lock"}


def test_data_that_another_process_prepared_meanwhile_is_used(workplace, capsys, monkeypatch):
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
    main([*SMALL, "--data", "sums.jsonl"])  # nothing is written, so no lock is needed
    assert len(turns) == 2


def test_a_second_call_finds_the_data_prepared_and_changes_nothing(workplace, capsys):
    with open("sums.jsonl", "ab") as file:
        file.write(b'{broken\n{"text": "good"}\n')
    flags = [*SMALL, "--data", "sums.jsonl", "--skip_bad_lines"]
    main(flags)
    printed, splits = capsys.readouterr().out, read_description("out/data/sums")["splits"]
    for name, part in splits.items():
        n, tokens = part["documents"], part["tokens"]
        assert f"{name:5} {n:>9,} documents {tokens:>13,} tokens" in printed
    assert "skipped 1 bad document, the first: sums.jsonl, line 61: not JSON" in printed
    assert splits["train"]["documents"] + splits["val"]["documents"] == 61
    before = contents("out")
    for more in ([], ["--overwrite", "--workers", "2"]):
        main([*flags, *more])
        assert capsys.readouterr().out == "out/data/sums: already prepared from this text\n"
    assert contents("out") == before


def test_the_size_of_the_text_decides_the_settings_and_they_are_printed(workplace, capsys):
    n_bytes = Path("lines.txt").write_text("".join(f"{i} {i * i}\n" for i in range(5000)))
    main(["--data", "lines.txt", "--workers", "1"])
    description = read_description("out/data/lines")
    assert description["vocab_size"] == 512
    train, val = description["splits"].values()
    documents = train["documents"] // 7 + val["documents"]
    assert documents == pytest.approx(n_bytes / 1024, rel=0.05)
    assert val["documents"] == pytest.approx(documents / 10, rel=0.5)
    assert val["bytes"] + train["bytes"] / 7 == n_bytes
    *_, chosen = capsys.readouterr().out.splitlines()
    expected = (
        "settings: --val_fraction 0.1, --segmentations 7, long files cut into documents of 1 KiB"
    )
    assert chosen.strip() == expected


def test_the_files_of_a_folder_and_few_bytes_per_token_are_reported(workplace, capsys):
    dice, folder = random.Random(0), Path("texts")
    (folder / ".cache").mkdir(parents=True)
    shutil.move("sums.jsonl", folder / "SUMS.JSONL")
    for ignored in (".cache/copy.txt", "notes.md"):
        (folder / ignored).write_text("not read")
    (folder / "again.jsonl").symlink_to("SUMS.JSONL")  # the same text is not ignored
    (folder / "loop").symlink_to(".")
    main(["--data", "texts", "--workers", "1"])
    printed = capsys.readouterr().out
    assert "  read 1 file, ignored 2, the first: texts/.cache/copy.txt\n" in printed
    assert "usual" not in printed
    rows = ["".join(chr(dice.randrange(33, 127)) for _ in range(50)) for _ in range(50)]
    Path("rare.TXT").write_text("\n".join(rows), encoding="utf-8")
    main(["--data", "rare.TXT", "--workers", "1"])
    printed = capsys.readouterr().out
    assert "bytes per token (WARNING: usual are 1.5 to 1.7)" in printed
    assert printed.startswith("out/data/rare: ")
    assert "ignored" not in printed


def test_markers_in_texts_are_counted_and_the_remedy_is_shown(workplace, tokenizer, capsys):
    texts = [f"<|im_start|>{i} + 1<|im_end|>" for i in range(60)] + [f"{i} + 3" for i in range(60)]
    Path("marked.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    main([*SMALL, "--data", "marked.jsonl"])
    warning = "WARNING: markers as text: '<|im_start|>' in 60 documents: --markers cuts there"
    assert warning in capsys.readouterr().out
    main([*SMALL, "--data", "marked.jsonl", "--markers", "--overwrite"])
    assert "  cut at markers: '<|im_start|>' in 60 documents\n" in capsys.readouterr().out
    chat = {"prompt": "1 + 1", "response": "2</s>"}
    Path("chat.jsonl").write_text(f"{json.dumps(chat)}\n" * 3)
    main(["--conversations", "chat.jsonl", "--tokenizer", tokenizer.path])
    assert "WARNING: markers as text: '</s>' in 3 conversations" in capsys.readouterr().out


def test_a_tokenizer_that_cannot_be_exported_is_named_before_training(workplace, packed, capsys):
    change = set_field("trainer_spec", "model_type", TrainerSpec.UNIGRAM)
    changed(packed / "tokenizer.model", Path("foreign.model"), change)
    main(["--data", "sums.jsonl", "--tokenizer", "foreign.model", "--workers", "1"])
    *_, last = capsys.readouterr().out.splitlines()
    assert "WARNING: export_hf and export_gguf will refuse the tokenizer" in last
    assert "is not BPE" in last
    main([*SMALL, "--data", "sums.jsonl", "--overwrite"])
    assert "will refuse" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["--data", "--conversations"])
def test_a_folder_with_splits_keeps_them_and_its_test_files_are_not_read(
    workplace, packed, capsys, kind
):
    rows = [{"prompt": f"{i} + 1?", "response": f"{i + 1}", "text": f"{i} + 1"} for i in range(56)]
    lines = [json.dumps(row) + "\n" for row in rows]
    Path("hub").mkdir()
    for name, some in (("train", lines[:40]), ("validation", lines[40:47]), ("test", lines[47:])):
        Path("hub", f"{name}.jsonl").write_text("".join(some))
    flags = [kind, "hub", "--tokenizer", str(packed), "--out"]
    main([*flags, "out/hub"])
    train, val = read_description("out/hub")["splits"].values()
    ways = 7 if kind == "--data" else 1
    assert (train["documents"], val["documents"]) == (40 * ways, 7)
    printed = capsys.readouterr().out
    if kind == "--conversations":
        assert " kB of answers in " in printed
        assert f" {train['answers']['tokens']} of them in answers\n" in printed
        assert f" {val['answers']['tokens']} of them in answers\n" in printed
        assert '  keys that are not read: "text" in 47 conversations\n' in printed
    assert "read 2 files, ignored 0\n" in printed
    assert "for validation: 1 file, the first: hub/validation.jsonl\n" in printed
    assert "not read, for testing: 1 file, the first: hub/test.jsonl\n" in printed
    assert "--val_fraction 0," in printed
    main([*flags, "out/b", "--val_fraction", "0.5"])
    assert read_description("out/b")["splits"]["val"]["documents"] > 15  # also of hub/train.jsonl


def test_an_empty_validation_split_gives_a_warning_unless_val_fraction_is_0(workplace, capsys):
    Path("short.txt").write_text("".join(f"{a} + {a} = {2 * a}\n" for a in range(70)))
    main(["--workers", "1", "--data", "short.txt"])
    assert "WARNING: no validation split" in capsys.readouterr().out
    main(["--val_fraction", "0", "--data", "short.txt", "--overwrite"])
    assert "no validation split" not in capsys.readouterr().out


def test_default_folders_are_named_after_the_data_and_the_flags(workplace):
    for data in ("c.txt", "/a/c.jsonl", "/a/c.jsonl.gz", "c.jsonl.zst", "c.parquet", "/a/c/."):
        assert default_out(data) == Path("out/data/c")
    assert default_out("/a/v1.5.jsonl", is_chat=True).name == "v1.5-chat"
    assert default_out(".").name == workplace.name
    small = default_out("c.txt", "--vocab_size 2000")
    assert small == default_out("c.txt", "  --vocab_size   2000 ")
    assert small != default_out("c.txt", "--vocab_size 3000")


CHANGES = {  # name → function that makes the change and returns its flags
    "other text": lambda: write_corpus(Path("sums.jsonl"), 70) and [],
    "a given tokenizer": lambda: ["--tokenizer", shutil.copy("out/data/sums/tokenizer.model", "t")],
    "a damaged tokenizer": lambda: Path("out/data/sums/tokenizer.model").write_text("") or [],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_other_text_or_settings_replace_prepared_data_only_with_overwrite(
    workplace, capsys, refusal, change
):
    main([*SMALL, "--data", "sums.jsonl"])
    flags = [*SMALL, "--data", "sums.jsonl", *change()]
    before = contents("out")
    assert "--overwrite" in refusal(prepare_data, *flags)
    assert contents("out") == before
    main([*flags, "--overwrite"])
    assert contents("out") != before
    main(flags)
    assert "already prepared" in capsys.readouterr().out


def test_reuse_keeps_other_settings_replaces_changed_text_and_refuses_other_paths(
    workplace, capsys, refusal
):
    main([*SMALL, "--data", "sums.jsonl"])
    before = contents("out")
    main(["--data", "sums.jsonl", "--reuse"])
    assert "with other settings, used as it is" in capsys.readouterr().out
    Path("other").mkdir()
    write_corpus(Path("other/sums.jsonl"), 50)
    shutil.copy("sums.jsonl", "sums.txt")
    for data in ("other/sums.jsonl", "sums.txt"):
        said = refusal(prepare_data, *SMALL, "--data", data, "--reuse")
        assert f"{workplace}/out/data/sums exists: pass --overwrite" in said
    assert contents("out") == before
    write_corpus(Path("sums.jsonl"), 70)
    main([*SMALL, "--data", "sums.jsonl", "--reuse"])  # the text has changed
    assert contents("out") != before


def test_a_file_or_a_folder_with_other_contents_is_never_replaced(workplace, refusal):
    Path("text").mkdir()
    shutil.move("sums.jsonl", "text/sums.jsonl")
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years of work")
    Path("there").write_text("a file")
    before = contents(".")
    flags = [*SMALL, "--data", "text", "--overwrite", "--out"]
    assert "holds the text itself" in refusal(prepare_data, *flags, "text")
    for out in ("mine", "there"):
        said = refusal(prepare_data, *flags, out)
        assert f"{out} exists and is no prepared data: choose another folder" in said
    assert contents(".") == before


SUMS = "--data sums.jsonl"
CHAT_MODEL = "--conversations sums.jsonl --tokenizer MODEL"
REFUSED = {
    "--data nowhere.jsonl": "nowhere.jsonl: no such file",
    "--data short.txt --vocab_size 300": "too little text",
    f"{SUMS} --text_column body": "line 1: no column 'body' (--text_column); it has 'text'",
    "--data short.txt --text_column body": "short.txt has no columns: leave out --text_column",
    f"{SUMS} --vocab_size 0": "vocab_size 0",
    f"{SUMS} --val_fraction 1": "--val_fraction",
    f"{SUMS} --workers 0": "--workers",
    f"{SUMS} --tokenizer sums.jsonl": "sums.jsonl",
    f"{SUMS} --out sums.jsonl/o": "sums.jsonl",
    "--conversations sums.jsonl": "pass --tokenizer",
    f"{CHAT_MODEL} --markers": "--markers cannot be used with --conversations",
    f"{CHAT_MODEL} --data sums.jsonl": "--data cannot be used with --conversations",
    CHAT_MODEL: "sums.jsonl, line 1: no conversation",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_wrong_flag_is_refused_in_one_line_and_changes_no_data(workplace, packed, refusal, flags):
    Path("short.txt").write_text("abc")
    before = contents(".")
    words = flags.replace("MODEL", str(packed / "tokenizer.model")).split()
    assert REFUSED[flags] in refusal(prepare_data, *words)
    assert contents(".") == before
