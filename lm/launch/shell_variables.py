"""Read the environment variables of run_accelerate.sh, and prepare the text that they name."""

import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from lm.common.errors import ReportedError, UsageError
from lm.data.corpus import SUFFIXES, find_files
from lm.data.prepare import default_out
from lm.training.arguments import DistillationArguments, SFTArguments, TrainingArguments
from lm.training.prepared_data import require_text_of_run

# STAGE → the training program's arguments, and the variables that the stage does not use.
STAGES = {
    "pretrain": (TrainingArguments, ("CHAT", "TEACHER")),
    "sft": (SFTArguments, ("DATA", "TEACHER", "PREPARE_FLAGS")),
    "distill": (DistillationArguments, ("DATA", "CHAT", "PREPARE_FLAGS")),
}
CONFIGS = Path("configs")


@dataclass
class ShellVariables:
    """The environment variables of run_accelerate.sh and the typed flags. Raises UsageError if a
    variable is invalid or contradicts another variable."""

    environ: Mapping[str, str]
    flags: list[str]

    def __post_init__(self):
        self.stage = self.get("STAGE", "pretrain")
        if self.stage not in STAGES:
            raise UsageError(f"STAGE must be pretrain, sft or distill, not {self.stage}")
        self.kind, unused = STAGES[self.stage]
        for name in unused:
            if self.get(name):
                help_text = "unset it, or see bash run_accelerate.sh --help"
                raise UsageError(f"STAGE={self.stage} does not use {name}: {help_text}")
        self.minutes = self._minutes()
        self.machines, self.machine = self._count("NUM_MACHINES", 1), self._count("MACHINE_RANK", 0)
        self.port = self._count("MASTER_PORT", 29500 if self.machines > 1 else 0)
        if not (self.machine < self.machines and self.port < 1 << 16):
            rank = f"MACHINE_RANK {self.machine} must be below NUM_MACHINES {self.machines}"
            raise UsageError(f"{rank}, and MASTER_PORT {self.port} below 65536")
        self.address = self.get("MASTER_ADDR")
        if not self.get("NUM_MACHINES") and (self.get("MACHINE_RANK") or self.address):
            several = "MACHINE_RANK and MASTER_ADDR are for several machines"
            raise UsageError(f"{several}: set NUM_MACHINES too")
        if self.machines > 1:
            try:
                socket.getaddrinfo(self.address, 0)
            except OSError as error:
                what = "MASTER_ADDR must be the address of machine 0"
                cannot = f"this machine cannot resolve {self.address!r}"
                raise UsageError(f"{what}: {cannot}") from error
        self.config = self._config()

    def get(self, name: str, default: str = "") -> str:
        """Return the value of a variable. An empty variable counts as not set."""
        return self.environ.get(name) or default

    def _count(self, name: str, default: int) -> int:
        text = self.get(name, str(default))
        if not (text.isascii() and text.isdigit()):
            raise UsageError(f"{name} must be an integer, 0 or larger, not {text!r}")
        return int(text)

    def _minutes(self) -> float:
        text = self.get("MINUTES", "10" if torch.cuda.is_available() else "4")
        if not (text.replace(".", "", 1).isdecimal() and 0 < float(text) < float("inf")):
            raise UsageError(f"MINUTES must be a positive number, such as 30, not {text!r}")
        return float(text)

    def _config(self) -> str:
        """Return the path of Accelerate's configuration file."""
        engine, file = self.get("ENGINE"), self.get("CONFIG")
        if engine and file:
            raise UsageError("ENGINE names a file in configs/, CONFIG any file: set only one")
        if not engine:
            return file or "accelerate_config.yaml"
        names = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
        if engine not in names:
            choice = f"choose one of {' '.join(names)}"
            raise UsageError(f"ENGINE={engine} does not exist: {choice}")
        return str(CONFIGS / f"{engine}.yaml")

    def processes(self, gpus: int) -> int:
        """Return the number of processes on all machines. Each machine has `gpus` GPUs."""
        count = self._count("NUM_PROCESSES", self.machines * max(1, gpus))
        if count < 1 or count % self.machines:
            must = f"must be a positive multiple of NUM_MACHINES ({self.machines})"
            raise UsageError(f"NUM_PROCESSES {must}, not {count}")
        return count

    def launcher_words(self, processes: int) -> list[str]:
        """Return the flags of `accelerate launch`."""
        words = ["--config_file", self.config, "--num_processes", str(processes)]
        words += ["--main_process_port", str(self.port)]
        if self.machines > 1:
            words += ["--num_machines", str(self.machines), "--machine_rank", str(self.machine)]
            words += ["--main_process_ip", self.address]
            words += ["--deepspeed_multinode_launcher", "standard"]
        return words

    @property
    def names_data(self) -> bool:
        """True if prepared data is typed: --data."""
        return any(word.partition("=")[0] == "--data" for word in self.flags)

    def data_flags(self, saved: dict) -> list[str]:
        """Prepare text for pretraining; return the flags that name the data or the teacher. A run
        that is resumed goes on with its own data; `saved` are its flags. Raises UsageError if
        preparing fails, if --data is given with DATA or PREPARE_FLAGS, or if these two name other
        data than the run's."""
        if self.stage == "sft":  # prepared by the training program, which knows the tokenizer
            if saved and not self.get("CHAT"):
                return []
            return ["--conversations", self.get("CHAT", "builtin")]
        if self.stage == "distill":  # the teacher decides the data
            return ["--teacher", self.get("TEACHER", "auto")]
        text, more = self.get("DATA", "builtin"), self.get("PREPARE_FLAGS")
        if self.names_data:
            if self.get("DATA") or more:
                both = "--data (prepared data) excludes DATA and PREPARE_FLAGS (text to prepare)"
                raise UsageError(f"{both}: leave out --data, or both variables")
            return []
        folder = str(default_out(text, more))
        if data := saved.get("data"):
            if self.get("DATA") or more:
                named = " and ".join(name for name in ("DATA", "PREPARE_FLAGS") if self.get(name))
                run = Path(saved["out_dir"], saved["run_name"])
                require_text_of_run(named, find_files(text, SUFFIXES), Path(folder), data, run)
            return []
        command = [sys.executable, "-m", "scripts.prepare_data"]
        if "--tokenizer" not in more:  # data of another tokenizer is prepared again
            command.append("--reuse")  # data that was prepared by older defaults is kept
        command += [*shlex.split(more), "--data", text, "--out", folder, "--overwrite"]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise ReportedError(f"{text} could not be prepared")
        prompt = [] if text != "builtin" else ["--sample_prompt", "def"]
        return ["--data", folder, *prompt]
