"""Check and measure training on one GPU, within nine minutes: `bash benchmarks/gpu.sh`.

After preparation, parts run one after the other, the most useful first. Each part is killed at its
time limit. The folder $OUT (default: out/benchmarks/gpu) has these files:

- gpu.md: the report, written when a part begins and when it ends;
- rows.jsonl: measurements and results of parts, one JSON object per line;
- traces.zip: traces of the last micro-batch and the update of a step, for https://ui.perfetto.dev;
- log.txt: the output of all parts.

Only parts import torch, so the report is written even if torch hangs. If tests fail, the
measurements mean nothing.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks import REPOSITORY
from benchmarks.cli import heading, new_parser, say, table
from benchmarks.processes import adopt_orphans, end_all
from benchmarks.turns import NOTE, Turn, read_rows, record, table_rows
from lm.common.atomic import write_whole
from lm.common.errors import stop_in_order

PROGRAM = "benchmarks.gpu"
REPORT, ROWS, TRACES, LOG = "gpu.md", "rows.jsonl", "traces.zip", "log.txt"
SECONDS = 525  # for all parts together
SHORTEST = 5  # seconds; a part that has less time is left out
WHEELS, SITE = REPOSITORY / "out/wheels", REPOSITORY / "out/site"  # SITE: the installed wheels
COMPILED = REPOSITORY / "out/compiled/gpu"  # the parts' compile cache
PASSED, LATE = "passed", "out of time"
# The files with all tests that need a GPU. Starting processes takes most of the time: 8 at once.
TESTS = "-n 8 -v --tb=short -m gpu tests/integration/test_gpu.py tests/test_decoder.py"
# Patterns of the lines of the first command that the report quotes, each the last of its kind.
QUOTED = ("recipe: .*", "step .*tokens/s.*", "step .*bits per byte.*", "step .* sample .*")
ENGINES = "ours-compiled ours-zero2-compiled"
SIZES = {"104m": "--batch_size 32 --seq_len 1024", "360m": "--batch_size 16"}
TINY_FLAGS = "--dtype float32 --warmup_steps 1 --rounds 1 --steps 2"
TINY_SIZES = {"test": TINY_FLAGS, "3m": f"--batch_size 1 --seq_len 16 {TINY_FLAGS}"}
TINY = "**A rehearsal with tiny models, not compiled: its speeds, ratios and memory mean nothing.**"


class Part(NamedTuple):
    name: str
    seconds: int  # time limit
    command: list[str]


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    began = time.monotonic()
    parser = new_parser(PROGRAM, __doc__)
    parser.add_argument("--tiny", action="store_true", help="use tiny models, also without a GPU")
    parser.add_argument("--parts", nargs="+", help="names of the parts to run (default: all)")
    options = parser.parse_args(argv)
    tiny = options.tiny
    out = Path(os.environ.get("OUT", "out/benchmarks/gpu")).absolute()
    out.mkdir(parents=True, exist_ok=True)
    for name in (REPORT, ROWS, TRACES, LOG):
        (out / name).unlink(missing_ok=True)
    if tiny:
        record(out / ROWS, "note", {"text": TINY})
    try:
        parts = all_parts(out, tiny)
        chosen = [part for part in parts if part.name in (options.parts or [part.name])]
        passed = run_parts(chosen, out, began)
    finally:
        print((out / REPORT).read_text(encoding="utf-8"), flush=True)
    sys.exit(not passed)


def all_parts(out: Path, tiny: bool) -> list[Part]:
    """Return the parts in the order in which they run: preparation, then the most useful first."""
    sizes = TINY_SIZES if tiny else SIZES
    small, large = sizes

    def steps(size: str, accumulation_steps: int, *more: str) -> Part:
        contenders = " ".join([ENGINES, *more])
        flags = f"--sizes {size} --accumulation_steps {accumulation_steps} --rounds 2 "
        flags += f"--steps {10 if accumulation_steps == 1 else 3} --contenders {contenders} "
        flags += sizes[size]
        if tiny:
            flags = flags.replace("compiled", "eager")
        files = ["--rows", str(out / ROWS), "--traces", str(out / TRACES)]
        command = ["-m", "benchmarks.throughput", *flags.split(), *files]
        return python(f"{size}x{accumulation_steps}", 170 if more else 140, *command)

    def python(name: str, seconds: int, *arguments: str) -> Part:
        return Part(name, seconds, [sys.executable, *arguments])

    start = f"from benchmarks import gpu; gpu.start({str(out / ROWS)!r}, {tiny})"
    minutes = 0.3 if tiny else 2
    first = ["env", f"MINUTES={minutes}", f"PYTHON={sys.executable}", "bash", "run_accelerate.sh"]
    parts = [
        python("start", 90, "-c", start),
        python("tests", 150, "-m", "pytest", *TESTS.split()),
        Part("run_accelerate.sh", 200, first),
        steps(small, 1, "transformers-compiled"),
        steps(large, 1),
        steps(small, 8, "ours-zero2-compiled+uncoalesced"),
        steps(large, 8),
    ]
    if wheels := [str(path) for path in sorted(WHEELS.glob("*.whl"))]:
        flags = ["--quiet", "--no-index", "--no-deps", "--upgrade", "--target", str(SITE)]
        parts.insert(0, python("wheels", 60, "-m", "pip", "install", *flags, *wheels))
    return parts


def start(rows: str, tiny: bool) -> None:
    """Load the libraries, so that later parts find them in the file cache; prepare the text;
    describe the machine. Without a GPU, exit with an error, unless `tiny`."""
    import torch

    from benchmarks.work import DATA, SIZES
    from scripts.check_pins import differences

    notes = [heading(PROGRAM, ["--tiny"] if tiny else [])]
    if others := differences(REPOSITORY / "requirements.txt"):
        notes.append(f"Other versions than in requirements.txt: {others}.")
    for text in notes:
        record(Path(rows), "note", {"text": text})
    with suppress(ImportError):
        import deepspeed  # noqa: F401
    SIZES["test"].on(DATA)
    if not (tiny or torch.cuda.is_available()):
        sys.exit("there is no GPU; --tiny rehearses without one")


def run_parts(parts: list[Part], out: Path, began: float) -> bool:
    """Run the parts one after the other; return True if all have passed.

    Args:
        out: the folder of the report.
        began: time.monotonic() at the start of this program.
    """
    adopt_orphans()
    results = {}
    for part in parts:
        seconds = time_limit(part.seconds, time.monotonic() - began)
        if results.get("start", "").startswith("failed"):  # nothing else can run
            seconds = 0
        results[part.name] = run_part(part, seconds, out)
        say(f"{part.name}: {results[part.name]}")
    return set(results.values()) == {PASSED}


def time_limit(wanted: float, elapsed: float) -> float:
    """Return the seconds that a part may take; 0 if too few are left of SECONDS."""
    seconds = min(wanted, SECONDS - elapsed)
    return seconds if seconds >= SHORTEST else 0


def run_part(part: Part, seconds: float, out: Path) -> str:
    """Run a part, and kill its processes when it ends or after `seconds`; return its result."""
    row = {"part": part.name, "result": "stopped" if seconds else "left out", "seconds": 0.0}
    began = time.monotonic()
    with open(out / LOG, "a+b") as log:
        log.write(f"\n# {part.name}: {' '.join(part.command)}\n".encode())
        log.flush()
        first = log.tell()
        try:  # whatever ends the part, even a signal, leaves a result
            record(out / ROWS, "part", row | {"result": "running", "note": ""})
            write_report(out)
            if seconds:
                row["result"] = wait(started(part.command, log), began + seconds)
        finally:
            end_all()
            if row["result"] in (LATE, "stopped"):  # a killed compiler leaves unfinished files
                shutil.rmtree(COMPILED, ignore_errors=True)
            log.seek(first)
            row["note"] = summary(log.read().decode(errors="replace"), row["result"])
            row["seconds"] = round(time.monotonic() - began, 1)
            record(out / ROWS, "part", row)
            write_report(out)
    return row["result"]


def started(command: list[str], log) -> subprocess.Popen:
    """Start a command; its output goes into the file `log`."""
    search = os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH")]))
    ours = {"PYTHONPATH": search, "TORCHINDUCTOR_CACHE_DIR": str(COMPILED), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=os.environ | ours,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )


def wait(process: subprocess.Popen, deadline: float) -> str:
    """Wait for a process until the deadline; return the result."""
    with suppress(subprocess.TimeoutExpired):
        code = process.wait(timeout=deadline - time.monotonic())
        return PASSED if code == 0 else f"failed, exit code {code}"
    return LATE


def summary(output: str, result: str) -> str:
    """Return the counts of tests, with the names of failed tests, and the QUOTED lines. If a part
    without tests has not passed, add its last line."""
    lines = output.split("\n")
    tests = re.findall(r"^\[gw\d+\].* (PASSED|FAILED|ERROR|SKIPPED) (\S+)", output, re.MULTILINE)
    counts = Counter(outcome for outcome, _ in tests)
    said = [f"{number} {name.lower()}" for name, number in counts.items()]
    said += [name for outcome, name in tests if outcome in ("FAILED", "ERROR")]
    if not tests:
        said = [found[-1] for pattern in QUOTED if (found := re.findall(pattern, output))]
        if result != PASSED:
            said.append(next(filter(None, map(str.strip, reversed(lines))), "")[:200])
    return "; ".join(said).replace("|", "\\|")


def write_report(out: Path) -> None:
    write_whole(out / REPORT, report(read_rows(out / ROWS)))


def report(rows: list[tuple[str, dict]]) -> str:
    """Return the report in Markdown from (kind, row) pairs in the order of time."""
    notes = [row["text"] for kind, row in rows if kind == "note"]
    parts = {row["part"]: row for kind, row in rows if kind == "part"}
    measured, turns = [], []
    for kind, row in [*rows, ("part", {})]:  # each part has its own turns and baseline
        if kind == "turn":
            turns.append(Turn(**row))
        elif kind == "part" and turns:
            labels = {"model": turns[0].size, "accumulation": turns[0].accumulation_steps}
            measured += [labels | cells for cells in table_rows(turns)]
            turns = []
    profiles, failures = (
        [row for kind, row in rows if kind == wanted] for wanted in ("profile", "failure")
    )
    sections = {
        "Parts": list(parts.values()),
        "Steps": measured,
        "Seconds of the phases of one step": profiles,
        "Not measured": failures,
    }
    tables = [f"## {title}\n\n{table(cells)}" for title, cells in sections.items() if cells]
    return "\n\n".join(["# Training on a GPU", *notes, *tables, NOTE]) + "\n"


if __name__ == "__main__":
    main()
