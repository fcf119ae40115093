import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from data.tokenizer import Tokenizer
from formats.portable import load_portable, save_portable
from inference.generation import generate
from inference.sampling import Sampling, penalise
from model import LMConfig, Transformer
from scripts.generate import main
from tests.conftest import VOCAB_SIZE


@pytest.fixture(scope="module")
def weights(packed, tmp_path_factory) -> Path:
    """An untrained model that is sure enough of itself to tell texts apart."""
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    config = LMConfig(dim=32, n_layers=2, n_heads=4, max_seq_len=40, vocab_size=VOCAB_SIZE)
    model = Transformer(config)
    tensors = {
        name: p.data if "norm" in name else p.data * 8 for name, p in model.named_parameters()
    }
    save_portable(folder, config, tensors)
    shutil.copy(packed / "tokenizer.model", folder)
    return folder


@pytest.fixture
def call(weights, capsys):
    """Runs the script; gives what it wrote to stdout, to stderr, and its exit code."""

    def run(*flags: str, stdin: str = "") -> tuple[str, str, int]:
        code = 0
        sys_stdin, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(stdin.encode()))
        try:
            main([str(weights), "--device", "cpu", *flags])
        except SystemExit as ended:
            code = ended.code
        finally:
            sys.stdin = sys_stdin
        out, err = capsys.readouterr()
        return out, err, code

    return run


def expected(weights: Path, prompt: str, n: int, **sampling) -> str:
    tokenizer = Tokenizer(weights / "tokenizer.model")
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    settings = Sampling(**{"seed": 42} | sampling)
    stop_ids = (tokenizer.eos_id,)
    (new,) = generate(load_portable(weights), [ids], n, settings, stop_ids=stop_ids)
    return tokenizer.decode(new)


def test_it_prints_the_prompt_and_what_follows(call, weights):
    out, err, code = call("--prompt", "sum 3:", "--max_new_tokens", "12")
    assert out == "sum 3:" + expected(weights, "sum 3:", 12) + "\n"
    assert "12 tokens in" in err
    assert "float32 on cpu" in err
    assert code == 0


@pytest.mark.parametrize("penalty", [1.0, 1.7])
@pytest.mark.parametrize("prompt", ["sum ", "sum 1  ", " "])
def test_a_space_at_the_end_of_a_prompt_is_the_first_tokens(call, weights, prompt, penalty):
    tokenizer, model = Tokenizer(weights / "tokenizer.model"), load_portable(weights)
    read = [tokenizer.bos_id, *tokenizer.encode(prompt[:-1])]
    with torch.no_grad():
        logits = model(torch.tensor([read])).logits
    logits = penalise(
        logits[0, -1], torch.isin(torch.arange(VOCAB_SIZE), torch.tensor(read)), penalty
    )
    decoded = [tokenizer.decode([*read, id]) for id in range(VOCAB_SIZE)]
    begins = [id for id in range(VOCAB_SIZE) if decoded[id].startswith(prompt)]
    assert 10 < len(begins) < VOCAB_SIZE
    first = max(begins, key=lambda id: logits[id])
    greedy = Sampling(temperature=0, repetition_penalty=penalty)
    (rest,) = generate(model, [[*read, first]], 7, greedy, stop_ids=(tokenizer.eos_id,))
    flags = ("--greedy", "--repetition_penalty", str(penalty), "--max_new_tokens", "8")
    out, err, _ = call("--prompt", prompt, *flags)
    assert out == tokenizer.decode([*read, first, *rest]) + "\n"
    assert err.startswith(f"{len(rest) + 1} tokens in")
    (row,) = call("--prompt", prompt, *flags, "--jsonl")[0].splitlines()
    assert json.loads(row) == {"prompt": prompt, "text": out[len(prompt) : -1]}


def test_prompts_with_and_without_a_space_at_the_end_can_grow_together(call):
    prompts = ("sum ", "sum", "第1句: ", "1 + 2 =  ")
    flags = ("--max_new_tokens", "6", "--num_samples", "2", "--temperature", "2", "--top_k", "0")
    asked = [part for prompt in prompts for part in ("--prompt", prompt)]
    together = call(*asked, *flags)[0]
    assert call(*asked, *flags, "--batch_size", "1")[0] == together
    assert all(f"---\n{prompt}" in together for prompt in prompts)


def test_a_stop_string_is_not_looked_for_in_the_space_of_the_prompt(call):
    flags = ("--prompt", "sum ", "--greedy", "--max_new_tokens", "3")
    text = call(*flags)[0].removeprefix("sum ")
    assert call(*flags, "--stop", " " + text[0])[0] != "sum \n"
    assert call(*flags, "--stop", text[0])[0] == "sum \n"


def test_a_prompt_of_characters_that_the_tokenizer_does_not_know_is_pointed_out(call):
    flags = ("--prompt", "sum 1", "--prompt", "ab 龘龘龘龘", "--max_new_tokens", "2")
    assert "1 of 2 prompts: most characters of 'ab 龘龘龘龘'" in call(*flags)[1]
    assert "most characters" not in call("--prompt", "sum 1 龘龘", "--max_new_tokens", "2")[1]


def test_greedy_and_the_other_settings_reach_the_sampler(call, weights):
    settings = {
        "temperature": 1.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "seed": 5,
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    out, _, _ = call("--prompt", "sum", "--max_new_tokens", "9", *flags)
    assert out == "sum" + expected(weights, "sum", 9, **settings) + "\n"
    greedy, _, _ = call("--prompt", "sum", "--max_new_tokens", "9", "--greedy")
    assert greedy == "sum" + expected(weights, "sum", 9, temperature=0) + "\n" != out


def test_several_continuations_come_in_order_whatever_the_batch_size(call):
    flags = ("--prompt", "sum 1", "--prompt", "第", "--num_samples", "3", "--max_new_tokens", "7")
    out, _, _ = call(*flags)
    assert [line for line in out.split("\n") if line.startswith("---")] == [
        f"--- {i} of 6 ---" for i in range(1, 7)
    ]
    assert out.count("---\nsum 1") == out.count("---\n第") == 3
    assert call(*flags, "--batch_size", "1")[0] == call(*flags, "--batch_size", "4")[0] == out


def test_prompts_come_from_a_file_from_stdin_and_from_json_lines(call, tmp_path):
    (tmp_path / "p.txt").write_text("sum 1\n\n第\n", encoding="utf-8")
    (tmp_path / "p.jsonl").write_text('{"prompt": "sum 1"}\n{"text": "第"}\n', encoding="utf-8")
    common = ("--jsonl", "--max_new_tokens", "5")
    out, _, _ = call("--prompts", str(tmp_path / "p.txt"), *common)
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt"] for row in rows] == ["sum 1", "第"]
    assert all(row["text"] for row in rows)
    assert call("--prompts", str(tmp_path / "p.jsonl"), *common)[0] == out
    assert call("--prompts", "-", *common, stdin="sum 1\n\n第\n")[0] == out


def test_a_prompt_may_hold_what_only_some_take_for_a_line_end(call, tmp_path):
    (tmp_path / "p.txt").write_bytes("\ufeffsum\x0c1\r\nsum\u20282\n".encode())
    rows = json.dumps({"prompt": "sum\u20281"}, ensure_ascii=False)
    (tmp_path / "p.jsonl").write_text(rows + "\n", encoding="utf-8")
    for name, expected in (("p.txt", ["sum\x0c1", "sum\u20282"]), ("p.jsonl", ["sum\u20281"])):
        out, _, _ = call("--prompts", str(tmp_path / name), "--jsonl", "--max_new_tokens", "2")
        assert [json.loads(line)["prompt"] for line in out.rstrip("\n").split("\n")] == expected


def test_the_largest_seed_and_length_are_no_obstacle(call):
    flags = ("--seed", str(2**63 - 1), "--num_samples", "2", "--batch_size", "1")
    _, err, code = call("--prompt", "sum", "--max_new_tokens", str(10**15), *flags)
    assert "2 of 2 ended" in err or "1 of 1 ended" in err
    assert code == 0


def test_a_stop_string_ends_the_continuation(call, weights):
    text = expected(weights, "sum 3:", 20)
    stop = text[8:10]
    out, _, _ = call("--prompt", "sum 3:", "--max_new_tokens", "20", "--stop", stop)
    assert out == "sum 3:" + text[: text.index(stop)] + "\n"


def test_at_the_end_of_the_context_it_stops_and_says_so_or_slides(call):
    flags = ("--prompt", "sum 3:", "--max_new_tokens", "90", "--greedy")
    out, err, _ = call(*flags)
    assert "1 of 1 ended with the context of 40 tokens; --beyond_context slide goes on" in err
    longer, err, _ = call(*flags, "--beyond_context", "slide")
    assert "90 tokens in" in err
    assert longer.startswith(out.rstrip("\n"))


def test_a_conversation_goes_on_until_the_input_ends(call, weights):
    out, err, code = call(
        "--interactive", "--max_new_tokens", "5", stdin="sum 1\n\n" + "sum " * 40 + "\n第\n"
    )
    assert "sum 1" + expected(weights, "sum 1", 5) in out
    assert "第" + expected(weights, "第", 5) in out
    assert "an empty prompt" in err
    assert "the context of this model is 40" in err
    assert code == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "nothing to continue"),
        (("--prompt", ""), "an empty prompt"),
        (("--prompt", "\udcff"), "not valid UTF-8"),
        (("--prompt", "sum 1 " * 40), r"the context of this model is 40: shorten"),
        (("--prompts", "nowhere.txt"), "--prompts nowhere.txt: .*No such file"),
        (("--interactive", "--prompt", "x"), "leave --prompt and --prompts out"),
        (("--prompt", "x", "--device", "quark"), "--device quark cannot be used here"),
        (("--prompt", "x", "--device", "meta"), "--device meta cannot be used here"),
        (("--prompt", "x", "--promts", "y"), "did you mean --prompts?"),
        *(
            (("--prompt", "x", f"--{name}", "-1"), f"--{name} must be")
            for name in (
                *("num_samples", "max_new_tokens", "batch_size", "seed", "top_k", "top_p"),
                *("min_p", "temperature", "repetition_penalty"),
            )
        ),
    ],
    ids=str,
)
def test_what_cannot_work_is_one_line(call, flags, message):
    out, err, code = call(*flags)
    assert (out, code) == ("", 2)
    assert err.startswith("generate: error: ")
    assert err.count("\n") == 1
    assert re.search(message, err)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no prompt in it"),
        (b"\xff\xfe", "--prompts .*utf-8"),
        (b'{"prompt": "a"}\nnonsense\n', "line 2 is no JSON"),
        (b'{"question": "a"}\n', "line 1 has no 'prompt' and no 'text'"),
        (b'{"prompt": ""}\n', "an empty prompt"),
    ],
)
def test_a_file_of_prompts_that_is_none_is_one_line(call, tmp_path, content, message):
    (tmp_path / "p.jsonl").write_bytes(content)
    out, err, code = call("--prompts", str(tmp_path / "p.jsonl"))
    assert (out, code) == ("", 2)
    assert err.count("\n") == 1
    assert re.search(message, err)


def test_a_missing_tokenizer_and_a_wrong_folder_are_one_line(weights, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(weights, copy)
    (copy / "tokenizer.model").unlink()
    for folder, message in ((copy, "no such tokenizer file"), (tmp_path / "no", "no such folder")):
        with pytest.raises(SystemExit, match="2"):
            main([str(folder), "--prompt", "x"])
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("flags", [("--interactive",), ("--prompts", "-")])
def test_several_processes_do_not_read_stdin(call, monkeypatch, flags):
    monkeypatch.setenv("WORLD_SIZE", "2")
    out, err, code = call(*flags, stdin="sum\n")
    assert (out, code) == ("", 2)
    assert "processes cannot share stdin" in err


def test_of_several_processes_the_first_one_speaks(call, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert call("--prompt", "sum", "--max_new_tokens", "3") == ("", "", 0)
