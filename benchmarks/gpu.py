"""Check and measure training on one GPU, within nine minutes: `bash benchmarks/gpu.sh`.

After preparation, parts run one after the other, the most useful first. Each part is stopped at its
time limit. The folder $OUT (default: out/benchmarks/gpu) has these files:

- gpu.md: the report, with what each part has printed at its end; it grows whenever a part ends;
- traces.zip: traces of the last micro-batch and the update of a step, for https://ui.perfetto.dev;
- log.txt: the output of all parts.

Only parts import torch, so the report is written even if torch hangs.
"""

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks import REPOSITORY
from benchmarks.cli import heading, new_parser, say
from benchmarks.processes import adopt_orphans, end_all
from lm.common.errors import stop_in_order

PROGRAM = "benchmarks.gpu"
REPORT, TRACES, LOG = "gpu.md", "traces.zip", "log.txt"
SECONDS = 525  # for all parts together
SHORTEST = 5  # seconds; a part that has less time is left out
PATIENCE = 10  # seconds in which a part that is stopped can print its measurements
QUOTED = 40  # lines of the output of a part in the report
WHEELS, SITE = REPOSITORY / "out/wheels", REPOSITORY / "out/site"  # SITE: the installed wheels
COMPILED = REPOSITORY / "out/compiled/gpu"  # the parts' compile cache
PASSED, LATE = "passed", "out of time"
# The files with all tests that need a GPU. Starting processes takes most of the time: 8 at once.
TESTS = "-n 8 -q --tb=short -m gpu tests/integration/test_gpu.py tests/test_decoder.py"
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
    out = Path(os.environ.get("OUT", "out/benchmarks/gpu")).absolute()
    out.mkdir(parents=True, exist_ok=True)
    for name in (REPORT, TRACES, LOG):
        (out / name).unlink(missing_ok=True)
    parts = all_parts(out, options.tiny)
    chosen = [part for part in parts if part.name in (options.parts or [part.name])]
    try:
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
        command = ["-m", "benchmarks.throughput", *flags.split(), "--traces", str(out / TRACES)]
        return python(f"{size}x{accumulation_steps}", 170 if more else 140, *command)

    def python(name: str, seconds: int, *arguments: str) -> Part:
        return Part(name, seconds, [sys.executable, *arguments])

    minutes = 0.3 if tiny else 2
    first = ["env", f"MINUTES={minutes}", f"PYTHON={sys.executable}", "bash", "run_accelerate.sh"]
    parts = [
        python("start", 90, "-c", f"from benchmarks import gpu; gpu.start({tiny})"),
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


def start(tiny: bool) -> None:
    """Describe the machine; prepare the text. Without a GPU, exit with an error, unless `tiny`."""
    import torch

    from benchmarks.work import DATA, SIZES
    from scripts.check_pins import differences

    print(heading(PROGRAM, ["--tiny"] if tiny else []), TINY if tiny else "", sep="\n\n")
    if others := differences(REPOSITORY / "requirements.txt"):
        print(f"\nOther versions than in requirements.txt: {others}.")
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
        seconds = min(part.seconds, SECONDS - (time.monotonic() - began))
        if results.get("start", PASSED) != PASSED or seconds < SHORTEST:
            seconds = 0
        results[part.name] = run_part(part, seconds, out)
        say(f"{part.name}: {results[part.name]}")
    return set(results.values()) == {PASSED}


def run_part(part: Part, seconds: float, out: Path) -> str:
    """Run a part for at most `seconds` (0: not at all), kill its processes when it ends, and add
    its section to the report. Return its result."""
    result, began = "stopped" if seconds else "left out", time.monotonic()
    with open(out / LOG, "a+b") as log, open(out / REPORT, "a", encoding="utf-8") as report:
        log.write(f"\n# {part.name}: {' '.join(part.command)}\n".encode())
        log.flush()
        first = log.tell()
        try:  # whatever ends the part, even a signal, leaves a result
            if seconds:
                result = wait(part.command, log, seconds)
        finally:
            end_all()
            if result in (LATE, "stopped"):  # a killed compiler leaves unfinished files
                shutil.rmtree(COMPILED, ignore_errors=True)
            log.seek(first)
            said = log.read().decode(errors="replace").splitlines()[-QUOTED:]
            title = f"## {part.name}: {result}, {time.monotonic() - began:.0f} s"
            print(title, "", *said, "", sep="\n", file=report)
    return result


def wait(command: list[str], log, seconds: float) -> str:
    """Run a command for at most `seconds`, then ask it to end; its output goes into the file `log`.
    Return the result."""
    search = os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH")]))
    ours = {"PYTHONPATH": search, "TORCHINDUCTOR_CACHE_DIR": str(COMPILED), "PYTHONUNBUFFERED": "1"}
    files = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | ours, **files)
    with suppress(subprocess.TimeoutExpired):
        code = process.wait(seconds)
        return PASSED if code == 0 else f"failed, exit code {code}"
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)
    return LATE


if __name__ == "__main__":
    main()
