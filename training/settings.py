"""settings.json: the flags of a run and what ran it, for a reader a month later."""

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path

from common.atomic import write_whole
from data.chat_template import PLAIN_JINJA
from data.shards import CONVERSATIONS
from data.tokenizer import TOKENIZER_FILES, copy_tokenizer
from model import LMConfig
from runs.folder import RunFolder, read_settings
from training.arguments import TrainingArguments
from training.engine.launch import Engine

PACKAGES = ("torch", "accelerate", "deepspeed", "numpy", "sentencepiece")


def write_settings(
    run: RunFolder, args: TrainingArguments, config: LMConfig, engine: Engine, tokenizer: Path
) -> None:
    """Write settings.json, the run's tokenizer, and a chat template if it learns to answer."""
    packages = {name: version(name) for name in PACKAGES} | {"python": platform.python_version()}
    settings = {
        "program": args.program,
        "command": sys.argv,
        "arguments": vars(args),
        "model": config.to_dict(),
        "engine": engine.name,
        "processes": engine.processes,
        "deepspeed": engine.deepspeed,
        "packages": packages,
    }
    write_whole(run.settings, json.dumps(settings, indent=2, default=str) + "\n")
    for name in (*TOKENIZER_FILES, run.template.name):  # of another run that was begun here
        (run.path / name).unlink(missing_ok=True)
    copy_tokenizer(tokenizer, run.path)
    if args.dataset.kind == CONVERSATIONS:
        run.template.write_text(f"{PLAIN_JINJA}\n", encoding="utf-8")


def saved_arguments(run: RunFolder) -> dict:
    """Return the flags in the run's settings.json; none where it is missing or unreadable."""
    arguments = read_settings(run.settings).get("arguments")
    return arguments if isinstance(arguments, dict) else {}


def changed_arguments(run: RunFolder, args: TrainingArguments, engine: str) -> list[str]:
    """Return a line for each flag of training that differs from settings.json, and the engine."""
    before = saved_arguments(run) | {"resume": args.resume, "run_name": args.run_name}  # no matter
    lines = [f"--{k} {before[k]} → {v}" for k, v in vars(args).items() if before.get(k, v) != v]
    last = read_settings(run.settings).get("engine", engine)
    return lines if last == engine else [*lines, f"engine {last} → {engine}"]
