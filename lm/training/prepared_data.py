"""The folder of prepared data that a run reads. Conversations are prepared when a run starts."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from lm.common.errors import ReportedError, UsageError
from lm.data.conversations import SUFFIXES
from lm.data.corpus import find_files
from lm.data.prepare import conversations_out
from lm.data.shards import read_description
from lm.storage.find import data_of
from lm.storage.folder import read_settings
from lm.storage.weights import WeightsFolder
from lm.training.arguments import SFTArguments, TrainingArguments
from lm.training.distillation import TeacherWeights
from lm.training.starting_point import StartingPoint

REPOSITORY = Path(__file__).parents[2]


def prepared_data(
    args: TrainingArguments,
    start: StartingPoint,
    source: WeightsFolder | None,
    teacher: TeacherWeights | None,
) -> str:
    """Return the folder of prepared data; prepare conversations or a missing built-in corpus first.
    Raises UsageError if preparing fails, the teacher's data is missing, two flags conflict, or the
    conversations are not those of the resumed run."""
    if isinstance(args, SFTArguments) and args.data is None:
        tokenizer = source.tokenizer
        folder = str(conversations_out(args.conversations, tokenizer))
        own = read_settings(start.folder.settings).get("arguments", {}).get("data")
        if start.checkpoint and own and Path(own).exists():
            files, named = find_files(args.conversations, SUFFIXES), "--conversations"
            require_text_of_run(named, files, Path(folder), own, start.folder.path)
            return own
        flags = ["--conversations", args.conversations, "--tokenizer", str(tokenizer)]
    elif getattr(args, "conversations", "builtin") != "builtin" and not start.checkpoint:
        raise UsageError("--data is prepared data, --conversations is data to prepare: give one")
    elif args.data is None:
        return data_of(teacher.source.path)
    elif args.data == TrainingArguments.data and not Path(args.data).exists():
        folder, flags = args.data, ["--data", "builtin"]
    else:
        return args.data
    flags += ["--out", folder, "--reuse"]  # --reuse accepts data with other settings
    command = [sys.executable, "-m", "scripts.prepare_data", *flags]
    search = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environ = os.environ | {"PYTHONPATH": search}
    if subprocess.run(command, stdout=2, env=environ).returncode:  # stdout is for preflight's flags
        print(f"try: python -m scripts.prepare_data {shlex.join(flags)}", file=sys.stderr)
        raise ReportedError(f"{folder}: the data could not be prepared")
    return folder


def require_text_of_run(named: str, files: list[str], folder: Path, data: str, run: Path) -> None:
    """Raise UsageError unless `data`, the prepared data of a resumed run, is that of these files:
    it is never replaced. `named` are the settings that name the files, `folder` is where they are
    prepared."""
    then = read_description(Path(data)).get("prepared_from", {})
    now = (folder.resolve(), len(files), sum(map(os.path.getsize, files)))
    if now != (Path(data).resolve(), then.get("files"), then.get("bytes_on_disk")):
        raise UsageError(
            f"{named}: not what {run} was trained on; its data stays in {data}. To go on with it, "
            f"pass --data {data} instead. To train on other data, start a new run with --init_from "
            f"{run}, in pretraining also with PREPARE_FLAGS='--tokenizer {data}'"
        )
