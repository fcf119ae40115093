"""scripts.generate: prompts in, continuations out; flags that generate, chat and serve refuse."""

import importlib
import io
import json
import re
import sys
from pathlib import Path

import pytest
from conftest import VOCAB_SIZE
from small_model import opinionated, save_model

from lm.data.tokenizer import Tokenizer
from lm.formats.portable import load_portable
from lm.inference.generation import generate
from lm.inference.sampling import Sampling
from scripts.generate import main

CONTEXT = 40


@pytest.fixture(scope="module")
def weights(packed, tmp_path_factory) -> Path:
    """The weights of a small model, which continues different prompts differently."""
    return save_model(tmp_path_factory.mktemp("weights"), opinionated(VOCAB_SIZE, CONTEXT), packed)


@pytest.fixture
def call(weights, capsys, monkeypatch):
    """Runs the script; returns its stdout, its stderr and its exit code."""

    def run(*flags: str, stdin: str = "") -> tuple[str, str, int]:
        code = 0
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        try:
            main([str(weights), "--device", "cpu", *flags])
        except SystemExit as ended:
            code = ended.code
        out, err = capsys.readouterr()
        return out, err, code

    return run


def expected(weights: Path, prompt: str, n: int, **sampling) -> str:
    """Return the prompt and its continuation of at most n tokens as one text."""
    tokenizer = Tokenizer(weights / "tokenizer.model")
    ids, next_ids = tokenizer.encode_prompt(prompt)
    options = {"next_ids": next_ids, "stop_ids": (tokenizer.eos_id,)}
    settings = Sampling(**{"seed": 42} | sampling)
    (new,) = generate(load_portable(weights), [ids], n, settings, **options)
    return tokenizer.decode(ids + new)


@pytest.mark.parametrize("prompt", ["sum 3:", "sum 3: ", " "])  # the last two end with a space
def test_the_prompt_and_a_continuation_sampled_by_the_flags_are_printed(call, weights, prompt):
    settings = {"temperature": 1.5, "top_k": 7, "top_p": 0.9, "min_p": 0.05, "seed": 5}
    settings["repetition_penalty"] = 1.3
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    assert CONTEXT < 50  # the text becomes longer than the context
    common = ("--prompt", prompt, "--max_new_tokens", "50")
    out, err, code = call(*common)
    drawn, _, _ = call(*common, *flags)
    greedy, _, _ = call(*common, "--greedy")
    assert out == expected(weights, prompt, 50) + "\n"
    assert drawn == expected(weights, prompt, 50, **settings) + "\n"
    assert greedy == expected(weights, prompt, 50, temperature=0) + "\n"
    assert len({out, drawn, greedy}) == 3
    assert re.match(r"50 tokens in .* tokens/s\n", err)
    assert code == 0
    assert call(*common, "--greedy", "--stop", greedy[len(prompt)])[0] == prompt + "\n"


def test_several_continuations_come_in_order_whatever_the_batch_size(call, weights):
    prompts = ("sum ", "sum 1", "第1句: ")
    flags = [part for prompt in prompts for part in ("--prompt", prompt)]
    flags += ["--num_samples", "2", "--max_new_tokens", "7", "--temperature", "2", "--top_k", "0"]
    out, _, _ = call(*flags)
    headings = re.findall(r"^--- (\d of 6) ---\n(sum 1|sum |第1句: )", out, re.MULTILINE)
    assert headings == [(f"{i + 1} of 6", prompts[i // 2]) for i in range(6)]
    assert call(*flags, "--batch_size", "1")[0] == call(*flags, "--batch_size", "4")[0] == out
    rows = call(*flags, "--jsonl")[0].splitlines()
    texts = [row["prompt"] + row["text"] for row in map(json.loads, rows)]
    assert texts[3] == expected(weights, "sum 1", 7, temperature=2, top_k=0, seed=42 + 3)
    assert len({*texts}) == 6
    assert "".join(f"--- {i} of 6 ---\n{text}\n" for i, text in enumerate(texts, 1)) == out


def test_prompts_come_from_a_file_from_stdin_and_from_json_lines(call, tmp_path):
    # A form feed and U+2028 do not end a line.
    (tmp_path / "p.txt").write_bytes("\ufeffsum\x0c1\r\n\n第\u20282\n".encode())
    rows = [{"prompt": "sum\x0c1"}, {"prompt": "第\u20282"}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (tmp_path / "p.jsonl").write_text("\n".join(lines), encoding="utf-8")
    common = ("--jsonl", "--max_new_tokens", "5")
    out, _, _ = call("--prompts", str(tmp_path / "p.txt"), *common)
    found = [json.loads(line) for line in out.rstrip("\n").split("\n")]
    assert [row["prompt"] for row in found] == ["sum\x0c1", "第\u20282"]
    assert all(row["text"] for row in found)
    assert call("--prompts", str(tmp_path / "p.jsonl"), *common)[0] == out
    assert call("--prompts", "-", *common, stdin="sum\x0c1\n第\u20282\n")[0] == out
    (tmp_path / "p.jsonl").write_text('{"question": "a"}')
    out, err, code = call("--prompts", str(tmp_path / "p.jsonl"))
    assert (out, code) == ("", 2)
    assert re.match(r"generate: error: .*p.jsonl: 'prompt'.*\n$", err)


def test_interactive_prompts_are_read_until_the_input_ends(call, weights):
    out, err, code = call("--interactive", "--max_new_tokens", "5", stdin="sum 1\n\n第\n")
    assert out == expected(weights, "sum 1", 5) + "\n" + expected(weights, "第", 5) + "\n"
    assert code == 0
    long = "sum 1\n" + "sum " * 40 + "\n第\n"
    out, err, code = call("--interactive", "--max_new_tokens", "5", stdin=long)
    assert out == expected(weights, "sum 1", 5) + "\n"
    assert "the context has 40: shorten the prompt" in err
    assert code == 2


REFUSED = {  # flags: a pattern in the message
    (): "nothing to continue",
    ("--prompt", ""): "is empty",
    ("--prompt", "\udcff"): "not valid UTF-8",
    ("--prompts", "nowhere.txt"): "--prompts nowhere.txt: No such file or directory$",
    ("--interactive", "--prompt", "x"): "leave out --prompt and --prompts",
    ("--prompt", "x", "--device", "quark"): "--device quark cannot be used here",
    ("--prompt", "x", "--batch_size", "0"): "must be a whole number, at least 1, not 0",
    ("--prompt", "x", "--top_p", "0"): "--top_p must be above 0 and at most 1, not 0.0",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_flags_that_cannot_work_are_refused_in_one_line(call, flags):
    out, err, code = call(*flags)
    assert (out, code) == ("", 2)
    assert re.match(f"generate: error: .*{REFUSED[flags]}.*\n$", err)


@pytest.mark.parametrize("program", ["generate --prompts -", "chat", "serve --port 0"])
def test_several_processes_may_not_share_stdin_or_a_port(weights, refusal, monkeypatch, program):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # a launcher has set WORLD_SIZE
    name, *flags = program.split()
    said = refusal(importlib.import_module(f"scripts.{name}"), weights, *flags)
    assert re.search("share stdin|needs one process", said)
