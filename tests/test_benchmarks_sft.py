import json
import os
import signal
import sys
from itertools import accumulate
from types import SimpleNamespace

import pytest
from small_model import opinionated

from benchmarks import sft, sft_programs
from benchmarks.sft import choose, closing_line, main, row
from benchmarks.sft_programs import Program, export, programs, race
from benchmarks.sft_trl import WAYS
from common.errors import UsageError
from data.chat_template import encode_conversation
from data.conversations import Turn
from data.tokenizer import copy_tokenizer, open_tokenizer
from formats.portable import save_portable
from runs.weights import load_trained

CONTEXT = 64
STEPS = "import itertools\nfor n in itertools.count(1): print(f'step {n}/9  loss {n}.5  lr 1e-3')"


def program(name: str, code: str = STEPS, seconds: tuple = ()) -> Program:
    environment = os.environ | {"PYTHONPATH": ""}
    return Program(name, [sys.executable, "-c", code], sft.OUT, environment, list(seconds))


@pytest.fixture(autouse=True)
def out(tmp_path, monkeypatch):
    monkeypatch.setattr(sft, "OUT", tmp_path)
    return tmp_path


def test_passes_are_taken_in_turns_and_the_first_does_not_count(out, monkeypatch):
    taken = [9, 8, 1, 3, 2, 4]  # seconds; both begin, and then two rounds
    ticks = accumulate(tick for seconds in taken for tick in (0, seconds))
    monkeypatch.setattr(sft_programs, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    ours, peer = program("ours"), program("peer")
    race([ours, peer], steps=2, rounds=2, logs=out)
    assert (ours.seconds, peer.seconds) == ([1, 2], [3, 4])
    assert ours.loss == "6.5"  # three passes of two steps


def test_who_has_taken_its_turn_is_paused_and_at_the_end_ended(out):
    endless = program("endless")
    endless.start(out / "log")
    endless.take(1)
    process = endless._process
    stopped = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert stopped.si_status == signal.SIGSTOP
    endless.end()
    assert process.returncode == -signal.SIGKILL


def test_who_fails_is_named_with_its_last_words_and_nobody_is_left(out):
    well = program("well")
    badly = program("badly", "raise SystemExit('out of luck')")
    with pytest.raises(UsageError, match=r"badly ended with exit code 1, .*: out of luck"):
        race([well, badly], steps=1, rounds=1, logs=out)
    assert well._process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("line", "loss"),
    [
        ("step 12/128  loss 3.0102  lr 1.00e-04  grad_norm 0.9  9,000 tokens/s", "3.0102"),
        ("step 3/128  loss n/a  lr 1.00e-04", "n/a"),
        ("Epoch:[1/4](7/32), loss: 8.7654, logits_loss: 8.7, aux_loss: 0.0", "8.7654"),
        ("step 3/128 loss 2.5", "2.5"),
        ("step 3/128  SKIPPED: gradient norm inf", None),
        ("step 0/128  validation loss 3.2", None),
    ],
)
def test_the_end_of_a_step_is_seen(line, loss):
    found = sft_programs.STEP_ENDED.search(line)
    assert (found and found[1]) == loss


def conversation(n_words: int, *more: Turn) -> str:
    turns = [Turn("user", "1 + 2"), Turn("assistant", "; ".join(["3"] * n_words)), *more]
    return json.dumps({"messages": [turn._asdict() for turn in turns]})


@pytest.fixture
def chat(out):
    """Nine conversations that fit, one that is too long, and one without an answer at its end."""
    lines = [conversation(n) for n in range(1, 10)]
    lines += [conversation(CONTEXT), conversation(1, Turn("user", "?"))]
    path = out / "chat.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_conversations_are_chosen_evenly_and_their_tokens_counted(chat, packed):
    tokenizer = open_tokenizer(packed / "tokenizer.model")
    text, tokens = choose(str(chat), tokenizer, 3, CONTEXT)
    chosen = [json.loads(line)["conversations"] for line in text.splitlines()]
    assert [turns[-1]["content"].count("3") for turns in chosen] == [1, 4, 7]
    encoded = [encode_conversation(tokenizer, [Turn(**turn) for turn in each]) for each in chosen]
    assert tokens == sum(len(ids) for ids, _ in encoded)


def test_too_few_conversations_are_an_error(chat, packed):
    with pytest.raises(UsageError, match="9 conversations end with an answer within 64 tokens"):
        choose(str(chat), open_tokenizer(packed / "tokenizer.model"), 10, CONTEXT)


FAKES = {
    "minimind/model/__init__.py": "",
    "minimind/model/model_minimind.py": "class MiniMindConfig(dict):\n    pass\n",
    "minimind/trainer/train_full_sft.py": """
import json, pathlib, sys
from model.model_minimind import MiniMindConfig
told = {"sizes": MiniMindConfig(hidden_size=8), "flags": sys.argv[1:]}
pathlib.Path("../told.json").write_text(json.dumps(told))
for n in range(1, 100): print(f"Epoch:[1/9]({n}/99), loss: {n}.25, logits_loss: 0")
""",
    "packages/transformers.py": "class TrainerCallback:\n    pass\n",
    "packages/datasets.py": "class Dataset:\n    from_list = list\n",
    "packages/trl.py": """
import json, pathlib
from types import SimpleNamespace
def SFTConfig(**settings):
    return settings
class SFTTrainer:
    def __init__(self, *, model, args, train_dataset, callbacks):
        told = {"settings": args, "data": train_dataset, "model": model}
        pathlib.Path(args["output_dir"] + ".json").write_text(json.dumps(told))
        self.callback, = callbacks
    def train(self):
        for n in range(1, 100):
            state = SimpleNamespace(global_step=n, max_steps=99)
            self.callback.on_log(None, state, None, logs={"loss": n + 0.75})
            self.callback.on_log(None, state, None, logs={"train_runtime": 1.0})
""",
}


@pytest.fixture
def peers(out, monkeypatch):
    """Programs that say what they were told, in place of MiniMind's and TRL."""
    for name, text in FAKES.items():
        (out / "peers" / name).parent.mkdir(parents=True, exist_ok=True)
        (out / "peers" / name).write_text(text, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(out / "peers/packages"))
    return out / "peers"


@pytest.fixture
def prepared(out, peers, chat, packed) -> list[Program]:
    tokenizer = open_tokenizer(packed / "tokenizer.model")
    model = opinionated(tokenizer.vocab_size, CONTEXT)
    save_portable(out / "run/weights", model.config, dict(model.named_parameters()))
    copy_tokenizer(packed / "tokenizer.model", out / "run/weights")
    export(load_trained(str(out / "run")), out / "exported")
    (out / "conversations.jsonl").write_text(choose(str(chat), tokenizer, 4, CONTEXT)[0])
    args = SimpleNamespace(
        minimind=peers / "minimind", trl=sys.executable, batch_size=2, steps=2, rounds=1
    )
    return programs(args, out / "run", out)


def test_peers_are_told_the_same_sizes_and_conversations(prepared, out):
    _, *theirs = prepared
    race(theirs, steps=2, rounds=1, logs=out)
    assert [each.loss for each in theirs] == ["4.25", *["4.7500"] * len(WAYS)]
    told = json.loads((out / "minimind/told.json").read_text())
    assert told["sizes"] == {
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 128,
        "vocab_size": 400,
    }
    flags = dict(zip(told["flags"][::2], told["flags"][1::2], strict=True))
    assert (flags["--hidden_size"], flags["--num_hidden_layers"]) == ("32", "2")
    assert (flags["--batch_size"], flags["--epochs"]) == ("2", "2")
    assert flags["--max_seq_len"] == str(CONTEXT)
    assert (out / "minimind/model/tokenizer.json").exists()
    told = json.loads((out / "trl.json").read_text())
    assert told["settings"]["per_device_train_batch_size"] == 2
    assert told["settings"]["padding_free"]  # the last of the ways
    lines = (out / "conversations.jsonl").read_text().splitlines()
    turns = [json.loads(line)["conversations"] for line in lines]
    assert [each["prompt"] + each["completion"] for each in told["data"]] == turns
    answers = [turn["role"] for each in told["data"] for turn in each["completion"]]
    assert answers == ["assistant"] * 4


@pytest.mark.slow
@pytest.mark.variant  # of the fakes above, by the real program
def test_ours_takes_the_same_steps(prepared, out):
    ours = prepared[0]
    del ours.environment["PYTHONPATH"]  # where the fakes are
    race([ours], steps=2, rounds=1, logs=out)
    assert len(ours.seconds) == 1
    (metrics,) = (out / "ours/out/runs").glob("*/metrics.jsonl")
    last = [json.loads(line) for line in metrics.read_text().splitlines()][3]
    assert (last["step"], last["epoch"]) == (4, 2.0)
    assert f"{last['loss']:.4f}" == ours.loss


def test_a_row_has_medians_and_ratios_within_rounds():
    ours, slow = program("ours", seconds=(1, 2, 4)), program("slow", seconds=(4, 4, 4))
    quick = program("quick", seconds=(2, 2, 8))
    assert list(row(slow, ours, tokens=100).values()) == [
        "slow",
        "25 (25 to 25)",
        "2.00 (1.00 to 4.00)",
        "4.0",
        "",
    ]
    assert row(ours, ours, tokens=100)["tokens/s"] == "50 (25 to 100)"
    assert "2.00 (quick)" in closing_line([ours, slow, quick])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--minimind /no/such/place", "/no/such/place has no trainer/train_full_sft.py"),
        ("--minimind MINIMIND --trl /no/python", "/no/python cannot be run, or lacks one of"),
        ("--minimind MINIMIND --rounds 0", "whole numbers from 1 on"),
        ("--trl python", "--minimind"),
    ],
)
def test_nonsense_is_one_line_before_anything_is_written(flags, said, peers, out, capsys):
    before = sorted(out.iterdir())
    with pytest.raises(SystemExit) as ended:
        main(flags.replace("MINIMIND", str(peers / "minimind")).split())
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmarks.sft: error: ")
    assert said in error
    assert error.count("\n") == 1
    assert sorted(out.iterdir()) == before
