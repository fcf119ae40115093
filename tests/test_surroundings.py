"""Trouble beside training: whatever decorates a run, its weights are written first and stay."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from accelerate.tracking import TensorBoardTracker
from conftest import REPOSITORY, TINY, pack, run

from lm.storage.checkpoint import RunFolder
from lm.storage.find import PRETRAINING

PROGRAMS = ("train_pretrain_accelerate", "train_sft_accelerate", "train_several_accelerate")


def write_chat(folder: Path, n: int = 40) -> Path:
    """Write a file of `n` conversations."""
    rows = [{"prompt": f"{i} + 1 =", "response": f"{i + 1}"} for i in range(n)]
    (folder / "chat.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder / "chat.jsonl"


@pytest.fixture
def train(packed, tmp_path):
    """Trains `name` for two steps with a program in this process; returns the run's folder."""

    def train(program: str, name: str, *flags: str) -> RunFolder:
        data, named = packed, ["--run_name", name]
        if program == "train_several_accelerate":
            (tmp_path / f"{name}.json").write_text("{}")
            named = ["--model", str(tmp_path / f"{name}.json")]
        if program == "train_sft_accelerate":
            data = tmp_path / "chat"
            how = {"kind": "conversations", "vocab_size": None, "tokenizer": str(packed)}
            pack(write_chat(tmp_path), data, val_fraction=0.2, **how)
        words = [*TINY, "--max_steps", "2", "--data", str(data), "--out_dir", str(tmp_path)]
        importlib.import_module(program).main([*words, *named, *flags])
        return RunFolder(tmp_path / name)

    return train


@pytest.fixture
def source(train) -> list[str]:
    """Flags that name a trained model, from which fine-tuning starts."""
    trained = train(Path(PRETRAINING).stem, "source", "--eval_interval", "0")
    return ["--init_from", str(trained.path)]


def fail(*args, **options):
    raise LookupError("two\nlines")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_failure_of_what_decorates_a_run_is_one_line(train, source, monkeypatch, capsys, program):
    for name in ("draw_losses", "write_report", "prompt_and_continuations", "final_numbers"):
        monkeypatch.setattr(f"lm.training.results.{name}", fail)
    monkeypatch.setattr("lm.training.run.yardsticks", fail)
    for name in ("log", "finish"):
        monkeypatch.setattr(TensorBoardTracker, name, fail)
    flags = ["--sample_interval", "1", "--log_with", "tensorboard"]
    run = train(program, "run", *flags, *(source if "sft" in program else []))
    said = capsys.readouterr().out
    for what in ("SAMPLE ", "BEST LOSS ", "tensorboard ", "loss curve: ", "report:     "):
        assert f"{what}NOT WRITTEN: two lines\n" in said
    assert ("gzip AND xz NOT WRITTEN" in said) is ("sft" not in program)
    assert (run.weights / "model.safetensors").exists()
    assert run.checkpoint(2).exists()


def test_results_that_do_not_fit_on_the_disk_end_the_run_in_one_line(train, small_disk, capsys):
    disk = str(small_disk("300k"))
    with pytest.raises(SystemExit) as ended:
        train("train_pretrain_accelerate", "run", "--dim", "64", "--out_dir", disk)
    assert ended.value.code == 2
    assert "error: no space left on the disk: " in capsys.readouterr().err.splitlines()[-1]


def test_a_tracker_that_does_not_start_leaves_the_name_of_the_run_free(train, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(TensorBoardTracker, "start", fail)
        with pytest.raises(SystemExit) as ended:
            train("train_pretrain_accelerate", "run", "--log_with", "tensorboard")
    assert ended.value.code == 2
    said = "--log_with tensorboard: a tracker does not start (two lines); --log_with none"
    assert said in capsys.readouterr().err
    run = train("train_pretrain_accelerate", "run", "--log_with", "tensorboard")
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    monkeypatch.setattr(TensorBoardTracker, "start", fail)
    more = ["--log_with", "tensorboard", "--max_steps", "3", "--resume", "auto"]
    with pytest.raises(SystemExit):  # a resumed run stays as it is
        train("train_pretrain_accelerate", "run", *more)
    after = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    assert {path for path in before if before[path] != after.get(path)} <= {run.lock}


def test_a_resumed_run_keeps_its_conversations_when_their_file_has_grown(
    source, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    main = importlib.import_module("train_sft_accelerate").main
    flags = [*TINY, "--eval_interval", "0", "--out_dir", str(tmp_path), "--run_name", "run"]
    typed = ["--conversations", str(write_chat(tmp_path))]
    main([*flags, *typed, "--max_steps", "2", *source])
    (data,) = Path("out/data").glob("chat-*-chat")
    before = {path: path.read_bytes() for path in data.iterdir()}
    write_chat(tmp_path, 50)
    with pytest.raises(SystemExit) as ended:
        main([*flags, *typed, "--max_steps", "3", "--resume", "auto"])
    assert ended.value.code == 2
    assert f"--conversations: not what {tmp_path / 'run'} was" in capsys.readouterr().err
    main([*flags, "--max_steps", "3", "--resume", "auto"])
    assert RunFolder(tmp_path / "run").checkpoint(3).exists()
    assert {path: path.read_bytes() for path in data.iterdir()} == before


@pytest.mark.parametrize(
    "surroundings",
    [{"MPLBACKEND": "module://no_such_package.inline"}, {"MPLBACKEND": "nonsense"}, {"HOME": ""}],
)
def test_charts_are_drawn_in_any_surroundings(tmp_path, surroundings):
    """A user without a home directory is not in the system's list of users."""
    script = (
        "import pwd, os\n"
        "if not os.environ['HOME']:\n"
        "    del os.environ['HOME']\n"
        "    pwd.getpwuid = {}.__getitem__\n"
        "from lm.report.drawing import Chart, Curve, draw, plot\n"
        "chart = Chart('loss', '', '', curves=[Curve('a', [(1, 2.0)], None)])\n"
        "plot(chart).savefig('loss.png')\n"
        "assert '</svg>' in draw(chart)\n"
    )
    environ = {"PYTHONPATH": str(REPOSITORY)} | surroundings
    run([sys.executable, "-c", script], tmp_path, **environ).worked()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
