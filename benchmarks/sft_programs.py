"""Who trains in `benchmarks.sft`: how each is prepared, started, and paused."""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import REPOSITORY
from benchmarks.contenders import Contender, environments
from benchmarks.head_to_head import say
from benchmarks.racers import copy
from benchmarks.session import free_port
from benchmarks.sft_trl import WAYS
from common.errors import UsageError
from formats.hugging_face_export import write_model, write_tokenizer
from formats.portable import CONFIG_FILE, read_json, write_json
from runs.weights import Trained
from training.sft_arguments import SFTArguments

MINIMIND = Path("trainer/train_full_sft.py")
# It has flags for width and depth; the other sizes become defaults of its configuration.
WITH_SIZES = f"""
import functools, json, pathlib, runpy, sys
sys.path.insert(0, "..")
from model import model_minimind as peer
given = json.loads(pathlib.Path(sys.argv.pop(1)).read_text())
names = "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size"
sizes = {{name: given[name] for name in names}}
peer.MiniMindConfig = functools.partial(peer.MiniMindConfig, **sizes)
runpy.run_path("{MINIMIND.name}", run_name="__main__")
"""
STEP_ENDED = re.compile(r"(?:Epoch:\S+ |step \d+/\d+ +)loss:? ([^\s,]+)")
EVERYBODY = {"PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


@dataclass
class Program:
    """Trains, prints a line at the end of each step, and is paused between its turns."""

    name: str
    command: list  # of what has a str()
    folder: Path  # where it is run
    environment: dict[str, str]
    seconds: list[float] = field(default_factory=list)  # of each pass that counts
    loss: str = ""  # of the last step, as it says it

    def start(self, log: Path) -> None:
        """Run it, with its stderr in a file."""
        self._log = log
        with open(log, "wb") as errors:
            self._process = subprocess.Popen(
                list(map(str, self.command)),
                cwd=self.folder,
                env=self.environment | EVERYBODY,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
                start_new_session=True,  # its helpers are paused with it
            )

    def take(self, steps: int) -> float:
        """Seconds that so many steps have taken. Raises UsageError: it ended before."""
        self._signal(signal.SIGCONT)
        started = time.perf_counter()
        for _ in range(steps):
            self._end_of_step()
        seconds = time.perf_counter() - started
        self._signal(signal.SIGSTOP)
        return seconds

    def _end_of_step(self) -> None:
        for line in self._process.stdout:
            if ended := STEP_ENDED.search(line):
                self.loss = ended[1]
                return
        code = self._process.wait()
        said = self._log.read_text(encoding="utf-8", errors="replace").split()
        end = " ".join(said)[-300:]
        raise UsageError(f"{self.name} ended with exit code {code}, see {self._log}: {end}")

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # all of it has ended
            os.killpg(self._process.pid, number)

    def end(self) -> None:
        """With whatever it has started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()


def race(programs: list[Program], steps: int, rounds: int, logs: Path) -> None:
    """All take a pass of so many steps that does not count, and then `rounds` in turns. Raises
    UsageError: one of them failed."""
    with ExitStack() as started:
        for program in programs:
            program.start(logs / f"{program.name}.log".replace(" ", "-"))
            started.callback(program.end)
            say(f"{program.name}: first pass after {program.take(steps):.1f} s")
        for number in range(1, rounds + 1):
            for program in programs:
                program.seconds.append(program.take(steps))
            passes = ", ".join(f"{each.name} {each.seconds[-1]:.1f}" for each in programs)
            say(f"round {number}, seconds: {passes}")


def programs(args: argparse.Namespace, run: Path, out: Path) -> list[Program]:
    """Ours first. All train a pass more than there are rounds.

    Args:
        run: whose weights ours begins with, absolute as `out` is.
        out: where everybody writes, with conversations.jsonl in it, and exported/, see `export`.
    """
    data, exported, passes = out / "conversations.jsonl", out / "exported", args.rounds + 1
    amount = ["--batch_size", args.batch_size, "--epochs", passes, "--log_interval", 1]

    (ours := out / "ours").mkdir()
    words = ["--init_from", run, "--conversations", data, "--prepare_flags=--val_fraction 0"]
    words = [sys.executable, REPOSITORY / SFTArguments.program, *words, *amount]
    # On the engine of run_accelerate.sh.
    (launched,) = environments(Contender("ours", False, "zero2"), free_port(), ours, False)
    found = [Program("this project", [*words, "--log_with", "none"], ours, launched)]

    environment = os.environ | {"HF_DATASETS_CACHE": str(out / "datasets")}
    trainer = copy(args.minimind, out / "minimind") / MINIMIND.parent
    shutil.copytree(exported, out / "minimind/model", dirs_exist_ok=True)  # its tokenizer's place
    shape = read_json(exported / CONFIG_FILE)
    python = args.trl or sys.executable
    words = [python, "-c", WITH_SIZES, exported / CONFIG_FILE, "--data_path", data, *amount]
    words += ["--hidden_size", shape["hidden_size"], "--device", "cpu", "--from_weight", "none"]
    words += ["--num_hidden_layers", shape["num_hidden_layers"]]
    words += ["--max_seq_len", shape["max_position_embeddings"]]
    found.append(Program("MiniMind", words, trainer, environment))

    for way in WAYS if args.trl else ():
        words = [args.trl, "-m", "benchmarks.sft_trl", exported, data, out / "trl"]
        words += [args.batch_size, passes, way]
        found.append(Program(f"TRL, {way}", words, REPOSITORY, environment))
    return found


def export(trained: Trained, folder: Path) -> None:
    """For the peers: as if the model had learned to chat, for then its tokenizer has the template.
    Raises DataError: there is no exact equal of the tokenizer."""
    folder.mkdir()
    model, tokenizer = trained.model, trained.tokenizer
    write_model(folder, model, tokenizer, dtype="float32", name=folder.name, chat=True)
    write_tokenizer(folder, tokenizer, model.config.max_seq_len, chat=True)
    settings = read_json(folder / "tokenizer_config.json")
    settings["pad_token"] = settings["eos_token"]  # MiniMind's script wants one
    write_json(folder / "tokenizer_config.json", settings)
