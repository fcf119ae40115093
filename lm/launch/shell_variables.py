"""Read the environment variables of run_accelerate.sh, and prepare the text that they name."""

import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lm.common.errors import ReportedError, UsageError
from lm.data.corpus import SUFFIXES, find_files
from lm.data.prepare import default_out
from lm.training.arguments import DistillationArguments, SFTArguments, TrainingArguments
from lm.training.inputs import require_text_of_run
from train_distillation_accelerate import train as distill
from train_pretrain_accelerate import train as pretrain
from train_sft_accelerate import train as fine_tune

# STAGE → the training program's arguments and loop, and the variables that the stage does not use.
STAGES = {
    "pretrain": (TrainingArguments, pretrain, ("CHAT", "TEACHER")),
    "sft": (SFTArguments, fine_tune, ("DATA", "TEACHER", "PREPARE_FLAGS")),
    "distill": (DistillationArguments, distill, ("DATA", "CHAT", "PREPARE_FLAGS")),
}


class ShellVariables:
    """The environment variables of run_accelerate.sh. Raises UsageError if a variable is invalid or
    contradicts another variable."""

    def __init__(self, environ: Mapping[str, str]):
        self.environ = environ
        self.stage = self.get("STAGE", "pretrain")
        if self.stage not in STAGES:
            raise UsageError(f"STAGE must be pretrain, sft or distill, not {self.stage}")
        self.arguments, self.train, unused = STAGES[self.stage]
        if named := [name for name in unused if self.get(name)]:
            remedy = "unset it, or see bash run_accelerate.sh --help"
            raise UsageError(f"STAGE={self.stage} does not use {named[0]}: {remedy}")
        engine, file = self.get("ENGINE"), self.get("CONFIG")
        if engine and file:
            raise UsageError("ENGINE names a file in configs/, CONFIG any file: set only one")
        # Accelerate's configuration file.
        self.config = f"configs/{engine}.yaml" if engine else file or "accelerate_config.yaml"
        if not Path(self.config).is_file():
            known = sorted(path.stem for path in Path("configs").glob("*.yaml"))
            wrong = f"ENGINE={engine}: take one of {', '.join(known)}"
            raise UsageError(wrong if engine else f"CONFIG={self.config}: no such file")
        minutes = self.get("MINUTES", "10" if torch.cuda.is_available() else "4")
        if not (minutes.replace(".", "", 1).isdecimal() and 0 < float(minutes) < float("inf")):
            raise UsageError(f"MINUTES must be a positive number, such as 30, not {minutes!r}")
        self.minutes = float(minutes)
        self.machines, self.machine = self._count("NUM_MACHINES", 1), self._count("MACHINE_RANK", 0)
        self.port = self._count("MASTER_PORT", 29500 if self.machines > 1 else 0)
        self.address = self.get("MASTER_ADDR")
        here = max(1, torch.cuda.device_count())
        self.processes = self._count("NUM_PROCESSES", self.machines * here)  # of all machines
        if not (self.machine < self.machines and self.port < 1 << 16):
            rank = f"MACHINE_RANK {self.machine} must be below NUM_MACHINES {self.machines}"
            raise UsageError(f"{rank}, and MASTER_PORT {self.port} below 65536")
        if self.processes < 1 or self.processes % self.machines:
            must = f"must be a positive multiple of NUM_MACHINES ({self.machines})"
            raise UsageError(f"NUM_PROCESSES {must}, not {self.processes}")
        if self.address and not self.get("NUM_MACHINES"):
            raise UsageError("MASTER_ADDR is for several machines: set NUM_MACHINES too")
        if self.machines > 1:
            try:
                socket.getaddrinfo(self.address, 0)
            except OSError as error:
                cannot = f"this machine cannot resolve {self.address!r}"
                raise UsageError(f"MASTER_ADDR must name machine 0: {cannot}") from error

    def get(self, name: str, default: str = "") -> str:
        """Return the value of a variable. An empty variable counts as not set."""
        return self.environ.get(name) or default

    def _count(self, name: str, default: int) -> int:
        text = self.get(name, str(default))
        if not (text.isascii() and text.isdigit()):
            raise UsageError(f"{name} must be an integer, 0 or larger, not {text!r}")
        return int(text)

    def launcher_words(self) -> list[str]:
        """Return the flags of `accelerate launch`."""
        words = ["--config_file", self.config, "--num_processes", str(self.processes)]
        words += ["--main_process_port", str(self.port)]
        if self.machines > 1:
            words += ["--num_machines", str(self.machines), "--machine_rank", str(self.machine)]
            words += ["--main_process_ip", self.address]
            words += ["--deepspeed_multinode_launcher", "standard"]
        return words

    def data_flags(self, typed: dict[str, Any], saved: dict[str, Any]) -> dict[str, str]:
        """Prepare text for pretraining; return the flags that name the data or the teacher. A run
        that is resumed goes on with its own data; `saved` are its flags. Raises UsageError if
        preparing fails, if --data is given with DATA or PREPARE_FLAGS, or if these two name other
        data than the run's."""
        if self.stage == "sft":  # prepared by the training program, which knows the tokenizer
            keeps = saved and not self.get("CHAT")
            return {} if keeps else {"conversations": self.get("CHAT", "builtin")}
        if self.stage == "distill":  # the teacher decides the data
            return {"teacher": self.get("TEACHER")} if self.get("TEACHER") else {}
        text, more = self.get("DATA", "builtin"), self.get("PREPARE_FLAGS")
        named = " and ".join(name for name in ("DATA", "PREPARE_FLAGS") if self.get(name))
        if "data" in typed:
            if named:
                remedy = f"leave out --data, or {named}"
                raise UsageError(f"--data is prepared data, {named} text to prepare: {remedy}")
            return {}
        folder = str(default_out(text, more))
        if data := saved.get("data"):
            if named:
                run = Path(saved["out_dir"], saved["run_name"])
                require_text_of_run(named, find_files(text, SUFFIXES), Path(folder), data, run)
            return {}
        command = [sys.executable, "-m", "scripts.prepare_data"]
        if "--tokenizer" not in more:  # data of another tokenizer is prepared again
            command.append("--reuse")  # data that was prepared by older defaults is kept
        command += [*shlex.split(more), "--data", text, "--out", folder, "--overwrite"]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise ReportedError(f"{text} could not be prepared")
        return {"data": folder} | ({"sample_prompt": "def"} if text == "builtin" else {})
