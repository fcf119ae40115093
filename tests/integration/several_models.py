"""Models side by side, stopped and resumed, and each of them alone, in the same processes. Started
by test_several_launch.py, which compares the run folders.

    accelerate launch --multi_gpu ... several_models.py FOLDER ENGINE ...
"""

import io
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch
from torch.nn import functional

import train_pretrain_accelerate
import train_several_accelerate
from training.interruption import leave

LINEAR = functional.linear
AT_ONCE = "0.0000001"  # minutes: stop after the first step


def said_by(main, *words: str) -> str:
    functional.linear = LINEAR  # ZeRO-3 leaves another one behind
    said = io.StringIO()
    with redirect_stdout(said):
        main(list(words))
    return said.getvalue()


def main(folder: Path, engines: list[str]) -> None:
    # Programs follow each other in the group of the first one.
    torch.distributed.destroy_process_group = lambda group=None: None
    shared = json.loads((folder / "flags.json").read_text())
    several, alone = train_several_accelerate.main, train_pretrain_accelerate.main
    result = {}
    for engine in engines:
        files = sorted((folder / engine).glob("*.json"))
        words = [word for file in files for word in ("--model", str(file))]
        words += [*shared, "--out_dir", str(folder / engine / "together")]
        result[engine] = {
            "stopped": said_by(several, *words, "--time_limit", AT_ONCE),
            "resumed": said_by(several, *words, "--resume", "auto"),
        }
        for file in files:
            own = [f"--{name}={value}" for name, value in json.loads(file.read_text()).items()]
            where = ["--out_dir", str(folder / engine / "alone"), "--run_name", file.stem]
            said_by(alone, *own, *shared, *where)
    if os.environ["RANK"] == "0":
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
    finally:
        leave()
