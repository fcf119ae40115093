"""Bits per byte on held-out documents after equal wall time: this project's first command beside
MiniMind's and nanoGPT's training scripts, on the same text and the same cores, one after another.

    python -m benchmarks.head_to_head --data poems.jsonl --minimind ../minimind --nanogpt ../nanoGPT

`bash run_accelerate.sh` runs first, in a clone of its own, and its time from the command to the end
is everybody's time; preparing text and compiling count. The others run in copies of their
checkouts: nanoGPT with its README's flags for a laptop, and with as many steps as short trials say
that the time allows, so that its learning rate decays over all of it; MiniMind on all of the text,
with a model of our size, as its own does not end a step per minute on two cores. A run that takes
longer is ended, and its last save counts. Every eleventh document is held out from all three. A
character's or a token's loss is weighed by its bytes: bits per byte is the nats of all of the
documents' text, without markers between documents, over the bytes of it.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.cli import at_least, clean_environment, heading, new_parser, say, table
from benchmarks.racers import Racer, Reader, minimind, nanogpt, ours, write_jsonl
from common.errors import UsageError, one_line_errors, stop_in_order
from evaluation.language_modelling import windows
from model import IGNORE_INDEX

PROGRAM = "benchmarks.head_to_head"
OUT = Path("out/benchmarks/head_to_head")
HELD_OUT = 11  # every so many documents
POLL_SECONDS = 0.5
TRIAL = (20, 200)  # steps, of which the difference tells the time of one


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    with one_line_errors(PROGRAM, UsageError):
        args = parse_options(argv)
        train, held_out = split(args.data)
        shutil.rmtree(OUT, ignore_errors=True)
        OUT.mkdir(parents=True)
        racers = prepare(args, train, held_out)
        shown = held_out[:: -(-len(held_out) // args.documents)]
        rows, limit = [], math.inf
        for racer in racers:
            steps = affordable_steps(racer, limit) if racer.fits else 0
            say(f"{racer.name}: {steps or 'its own'} steps")
            seconds, saves = race(racer, steps, limit)
            limit = min(limit, seconds)  # the first one's time is everybody's
            for at, path in saves:
                racer.curve.append((at, bits_per_byte(racer.read(path), shown)))
                say(f"{racer.name}: {racer.curve[-1][1]:.3f} bits per byte at {at:.0f} s")
            rows.append(row(racer, seconds, steps))
        n_bytes = sum(len(text.encode()) for text in shown)
        print(f"{heading(PROGRAM, argv)}\n\nHeld out: {len(shown):,} documents, {n_bytes:,} bytes.")
        print(f"\n{table(rows)}")
        draw(racers, args.picture)


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Raises UsageError: a folder is no checkout."""
    parser = new_parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help='.jsonl, a document per line: {"text": "..."}')
    add("--minimind", type=Path, help="a checkout of MiniMind")
    add("--nanogpt", type=Path, help="a checkout of nanoGPT")
    add("--documents", type=at_least(1), default=400, help="of those held out, how many to score")
    add("--picture", type=Path, default=OUT / "curves.png", help="where to draw the curves")
    args = parser.parse_args(argv)
    scripts = {args.minimind: "trainer/train_pretrain.py", args.nanogpt: "train.py"}
    for folder, script in scripts.items():
        if folder and not (folder / script).is_file():
            raise UsageError(f"{folder} has no {script}")
    return args


def split(data: Path) -> tuple[list[str], list[str]]:
    """Return the texts to train on, and those held out. Raises UsageError: no such file, or another
    form."""
    try:
        lines = data.read_text(encoding="utf-8").split("\n")
        texts = [json.loads(line)["text"] for line in lines if line.strip()]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{data}: {error!r}") from error
    if len(texts) < HELD_OUT:
        raise UsageError(f"{data}: fewer than {HELD_OUT} documents")
    train = [text for i, text in enumerate(texts) if (i + 1) % HELD_OUT]
    return train, texts[HELD_OUT - 1 :: HELD_OUT]


def prepare(args: argparse.Namespace, train: list[str], held_out: list[str]) -> list[Racer]:
    """Return the racers, ours first, each in a folder of its own."""
    text, out = (OUT / "train.jsonl").resolve(), OUT.resolve()
    write_jsonl(text, train)
    found = [ours(out / "ours", text)]
    if args.minimind:
        found.append(minimind(args.minimind, out / "minimind", text))
    if args.nanogpt:
        found.append(nanogpt(args.nanogpt, out / "nanogpt", train + held_out))
    return found


def affordable_steps(racer: Racer, seconds: float) -> int:
    """Return with how many steps the run takes nearly this long, by two short trials."""
    few, more = TRIAL
    first, second = (race(racer, steps, math.inf)[0] for steps in TRIAL)
    step = max((second - first) / (more - few), 1e-6)
    startup = max(first - few * step, 0)
    return max(10, int((0.97 * seconds - startup) / step) // 10 * 10)


def race(racer: Racer, steps: int, limit: float) -> tuple[float, list[tuple[float, Path]]]:
    """Run a racer's command to the end, or for `limit` seconds.

    Returns the seconds it took, and (seconds, file) for each time that it saved weights; files
    that will be written over are copied. Raises UsageError: it failed, or saved nothing.
    """
    log = OUT / f"{racer.name.replace(' ', '-')}.log"
    started, began = time.monotonic(), time.time()
    saves: dict[tuple[Path, float], tuple[float, Path]] = {}
    with open(log, "w") as output:
        process = subprocess.Popen(
            racer.command(steps),
            cwd=racer.folder / racer.where,
            env=clean_environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while True:
            ended = process.poll() is not None
            for path in racer.folder.glob(racer.saves):
                saved = path.stat().st_mtime
                settled = ended or time.time() - saved > 2 * POLL_SECONDS
                if settled and saved > began and (path, saved) not in saves:
                    kept = path
                    if path.name != "state.json":  # of a checkpoint of ours, which stays
                        kept = OUT / f"{racer.name}-{len(saves)}{path.suffix}"
                        shutil.copy(path, kept)
                    saves[path, saved] = (saved - began, kept)
            if ended or time.monotonic() - started > limit:
                break
            time.sleep(POLL_SECONDS)
        took = time.monotonic() - started
    finally:
        if process.poll() is None:  # run_accelerate.sh passes it on to those in another session
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    if process.returncode not in (0, -signal.SIGTERM):
        raise UsageError(f"{racer.name} failed: {log.read_text()[-500:]}")
    if not saves and steps not in TRIAL:
        raise UsageError(f"{racer.name} saved no weights in {took:.0f} s: see {log}")
    return took, sorted(saves.values())


@torch.inference_mode()
def bits_per_byte(reader: Reader, documents: list[str]) -> float:
    """Score with windows of the model's context, each beginning half of it after the one before."""
    nats = 0.0
    for text in documents:
        ids = [reader.start, *reader.encode(text)]
        for tokens, targets in windows(ids, reader.context, max(1, reader.context // 2)):
            logits = reader.logits(torch.tensor([tokens]))[0].float()
            nats += nn.functional.cross_entropy(
                logits, torch.tensor(targets), ignore_index=IGNORE_INDEX, reduction="sum"
            ).item()
    return nats / math.log(2) / sum(len(text.encode()) for text in documents)


def row(racer: Racer, seconds: float, steps: int) -> dict[str, str]:
    at, value = racer.curve[-1]
    return {
        "": racer.name,
        "seconds in all": f"{seconds:.0f}",
        "steps": steps or "its own",
        "last weights at, s": f"{at:.0f}",
        "bits per byte": f"{value:.3f}",
    }


def draw(racers: list[Racer], picture: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for racer in racers:
        label = f"{racer.name} {racer.curve[-1][1]:.2f}"
        axes.plot(*zip(*racer.curve, strict=True), "o-", label=label, markersize=4)
    axes.set(xlabel="seconds since the command", ylabel="bits per byte, held-out documents")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture)


if __name__ == "__main__":
    main()
