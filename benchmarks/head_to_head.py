"""Bits per byte on held-out documents after equal wall time: this project's first command beside
MiniMind's and nanoGPT's training scripts, on the same text and the same cores, one after another.

    python -m benchmarks.head_to_head --data poems.jsonl --minimind ../minimind --nanogpt ../nanoGPT

`bash run_accelerate.sh` runs first, in a clone of its own, and what it takes from the command to
its end is everybody's time; preparing text and compiling count. The others run in copies of their
checkouts: nanoGPT with its README's flags for a laptop, and with as many steps as short trials say
that the time allows, so that its learning rate decays over all of it; MiniMind on all of the text,
with a model of our size, as its own does not end a step per minute on two cores. What runs over is
ended, and its last save counts. Every eleventh document is held out from all three. A character's
or a token's loss is weighed by its bytes: bits per byte is the nats of all of the documents' text,
without markers between documents, over the bytes of it.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.flags import at_least, new_parser
from benchmarks.markdown import heading, table
from benchmarks.racers import OUT, Contender, Reader, minimind, nanogpt, ours, write_jsonl
from common.errors import UsageError, one_line_errors, stop_in_order
from evaluation.language_modelling import windows
from model import IGNORE_INDEX

PROGRAM = "benchmarks.head_to_head"
HELD_OUT = 11  # every so many documents
POLL_SECONDS = 0.5
TRIAL = (20, 200)  # steps, of which the difference tells the time of one


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    with one_line_errors(PROGRAM, UsageError):
        args = parse_options(argv)
        require_checkouts(args)
        train, held_out = split(args.data)
        if OUT.exists():
            shutil.rmtree(OUT)
        OUT.mkdir(parents=True)
        first, *others = contenders(args, train, held_out)
        say(f"{first.name}: {len(train):,} documents; held out: {len(held_out):,}")
        seconds, saves = race(first, steps=0, limit=math.inf)
        shown = held_out[:: -(-len(held_out) // args.documents)]
        score(first, saves, shown)
        rows = [row(first, seconds)]
        for contender in others:
            steps = affordable_steps(contender, seconds) if contender.fits else None
            say(f"{contender.name}: {steps or 'its own'} steps")
            took, saves = race(contender, steps or 0, limit=seconds)
            score(contender, saves, shown)
            rows.append(row(contender, took, steps))
        print(heading(PROGRAM, argv))
        n_bytes = sum(len(text.encode()) for text in shown)
        print(f"\nHeld out: {len(shown):,} documents, {n_bytes:,} bytes.\n")
        print(table(rows))
        draw([first, *others], args.picture)


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help='.jsonl, a document per line: {"text": "..."}')
    add("--minimind", type=Path, help="a checkout of MiniMind")
    add("--nanogpt", type=Path, help="a checkout of nanoGPT")
    add("--documents", type=at_least(1), default=400, help="of those held out, how many to score")
    add("--picture", type=Path, default=OUT / "curves.png", help="where to draw the curves")
    return parser.parse_args(argv)


def require_checkouts(args: argparse.Namespace) -> None:
    """Raises UsageError: one of the folders is none."""
    for folder, script in (
        (args.minimind, "trainer/train_pretrain.py"),
        (args.nanogpt, "train.py"),
    ):
        if folder and not (folder / script).is_file():
            raise UsageError(f"{folder} has no {script}")


def split(data: Path) -> tuple[list[str], list[str]]:
    """Texts to train on, and those held out. Raises UsageError: no such file, or another form."""
    try:
        lines = data.read_text(encoding="utf-8").split("\n")
        texts = [json.loads(line)["text"] for line in lines if line.strip()]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{data}: {error!r}") from error
    if len(texts) < HELD_OUT:
        raise UsageError(f"{data}: fewer than {HELD_OUT} documents")
    train = [text for i, text in enumerate(texts) if (i + 1) % HELD_OUT]
    return train, texts[HELD_OUT - 1 :: HELD_OUT]


def contenders(args: argparse.Namespace, train: list[str], held_out: list[str]) -> list[Contender]:
    """Ours first; each in a folder of its own, with its text."""
    text = (OUT / "train.jsonl").resolve()
    write_jsonl(text, train)
    found = [ours(text)]
    if args.minimind:
        found.append(minimind(args.minimind, train))
    if args.nanogpt:
        found.append(nanogpt(args.nanogpt, train, held_out))
    return found


def affordable_steps(contender: Contender, seconds: float) -> int:
    """So many that the run takes nearly this long, by two short trials."""
    few, more = TRIAL
    first, second = (race(contender, steps, math.inf)[0] for steps in TRIAL)
    step = max((second - first) / (more - few), 1e-6)
    startup = max(first - few * step, 0)
    return max(10, int((0.97 * seconds - startup) / step) // 10 * 10)


def race(contender: Contender, steps: int, limit: float) -> tuple[float, list[tuple[float, Path]]]:
    """Run its command to the end, or for `limit` seconds.

    Returns: the seconds it took, and (seconds, file) for each time that it saved weights; files of
    which there is one are copied. Raises UsageError: it failed, or saved nothing.
    """
    folder = contender.folder.resolve()
    log = OUT / f"{contender.name.replace(' ', '-')}.log"
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = contender.command(steps)
    started, began = time.monotonic(), time.time()
    saves: dict[tuple[Path, int], tuple[float, Path]] = {}
    with open(log, "w") as output:
        process = subprocess.Popen(
            command,
            cwd=folder / contender.where,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while True:
            ended = process.poll() is not None
            for path in folder.glob(contender.saves):
                stat = path.stat()
                settled = ended or time.time() - stat.st_mtime > 2 * POLL_SECONDS
                key = (path, stat.st_mtime_ns)
                if settled and key not in saves and stat.st_mtime > began:
                    saves[key] = (stat.st_mtime - began, keep(contender, path, len(saves)))
            if ended or time.monotonic() - started > limit:
                break
            time.sleep(POLL_SECONDS)
        took = time.monotonic() - started
    finally:
        if process.poll() is None:  # run_accelerate.sh passes it on to those in another session
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    if process.returncode not in (0, -signal.SIGTERM):
        raise UsageError(f"{contender.name} failed: {log.read_text()[-500:]}")
    if not saves and steps not in TRIAL:
        raise UsageError(f"{contender.name} saved no weights in {took:.0f} s: see {log}")
    return took, sorted(saves.values())


def keep(contender: Contender, path: Path, number: int) -> Path:
    """A file that will be written over is copied."""
    if "?" in contender.saves and path.name == "state.json":
        return path
    copied = OUT / f"{contender.name}-{number}{path.suffix}"
    shutil.copy(path, copied)
    return copied


def score(contender: Contender, saves: list[tuple[float, Path]], documents: list[str]) -> None:
    for seconds, path in saves:
        contender.curve.append((seconds, bits_per_byte(contender.read(path), documents)))
        say(f"{contender.name}: {contender.curve[-1][1]:.3f} bits per byte at {seconds:.0f} s")


@torch.inference_mode()
def bits_per_byte(reader: Reader, documents: list[str]) -> float:
    """With windows of the model's context, each beginning half of it after the one before."""
    nats = 0.0
    for text in documents:
        ids = [reader.start, *reader.encode(text)]
        for tokens, targets in windows(ids, reader.context, max(1, reader.context // 2)):
            logits = reader.logits(torch.tensor([tokens]))[0].float()
            nats += nn.functional.cross_entropy(
                logits, torch.tensor(targets), ignore_index=IGNORE_INDEX, reduction="sum"
            ).item()
    return nats / math.log(2) / sum(len(text.encode()) for text in documents)


def row(contender: Contender, seconds: float, steps: int | None = None) -> dict[str, str]:
    at, value = contender.curve[-1]
    return {
        "": contender.name,
        "seconds in all": f"{seconds:.0f}",
        "steps": steps or "its own",
        "last weights at, s": f"{at:.0f}",
        "bits per byte": f"{value:.3f}",
    }


def draw(found: list[Contender], picture: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for contender in found:
        label = f"{contender.name} {contender.curve[-1][1]:.2f}"
        axes.plot(*zip(*contender.curve, strict=True), "o-", label=label, markersize=4)
    axes.set(xlabel="seconds since the command", ylabel="bits per byte, held-out documents")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
