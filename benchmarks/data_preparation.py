"""Preparation, measured from outside: seconds and memory of the command that people type."""

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import REPOSITORY
from benchmarks.markdown import table
from data.corpus import BUILTIN, find_files, is_jsonl
from data.errors import DataError
from data.shards import DESCRIPTION_FILE, read_description
from data.tokenizer import TOKENIZER_FILE

SAMPLE_SECONDS = 0.1  # between looks at the memory: each costs about a millisecond per process


@dataclass
class Preparation:
    """One run of the command."""

    workers: int
    documents: int
    bytes: int  # of UTF-8 text, without the JSON around it
    tokens: int
    seconds: float  # of all, the interpreter's start included
    tokenizer_seconds: float  # until the tokenizer was there
    packing_seconds: float  # from then on
    cpu_seconds: float
    # The truth lies between: peaks may fall between two looks; those of single processes need not
    # coincide, and count shared pages once for each. None where the system does not tell.
    peak_pss: int | None  # bytes, the largest sum of all processes that was seen
    sum_of_peaks: int | None  # bytes


def prepare(source: str, out: Path, workers: int) -> Preparation:
    """Run scripts.prepare_data on a corpus into the folder out.

    Its two phases are told by the times at which it finished its files, the tokenizer and then the
    description.

    Raises:
        DataError: the command refused the text; its own words.
    """
    if source != BUILTIN:
        source = os.path.abspath(source)
    command = [sys.executable, "-m", "scripts.prepare_data", "--data", source, "--out", str(out)]
    command += ["--workers", str(workers)]
    cpu_before, started, clock = children_seconds(), time.time(), time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=output)
        peak_pss, sum_of_peaks = watch_memory(process)
        seconds = time.perf_counter() - clock
        output.seek(0)
        words = output.read().decode(errors="replace").split("prepare_data: error: ")[-1].strip()
    if process.returncode:
        raise DataError(words or f"scripts.prepare_data ended with {process.returncode}")
    splits = read_description(out)["splits"].values()
    tokenizer_done = (out / TOKENIZER_FILE).stat().st_mtime
    return Preparation(
        workers=workers,
        **{key: sum(split[key] for split in splits) for key in ("documents", "bytes", "tokens")},
        seconds=seconds,
        tokenizer_seconds=tokenizer_done - started,
        packing_seconds=(out / DESCRIPTION_FILE).stat().st_mtime - tokenizer_done,
        cpu_seconds=children_seconds() - cpu_before,
        peak_pss=peak_pss,
        sum_of_peaks=sum_of_peaks,
    )


def children_seconds() -> float:
    """CPU seconds of all processes below this one that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def watch_memory(process: subprocess.Popen) -> tuple[int | None, int | None]:
    """Wait for a process to end; (largest sum of Pss that was seen, sum of all VmHWM), bytes."""
    pss, peaks = 0, {}
    try:
        while process.poll() is None:
            memory = tree_memory(process.pid)
            pss = max(pss, sum(now for now, _ in memory.values()))
            peaks |= {pid: peak for pid, (_, peak) in memory.items()}
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SAMPLE_SECONDS)
    finally:
        process.kill()  # if this was interrupted; its workers end with it
    return pss or None, sum(peaks.values()) or None


def tree_memory(pid: int) -> dict[int, tuple[int, int]]:
    """(Pss, VmHWM) in bytes of a process and all below it, by pid; empty where /proc lacks them.

    Pss divides a page among the processes that map it, so that a sum counts every page once. VmHWM
    is the most that a process has ever had, shared pages included.
    """
    memory, pids = {}, [pid]
    for process in pids:  # grows while it is walked
        with contextlib.suppress(OSError, IndexError):  # a process that has just ended
            folder = Path(f"/proc/{process}")
            for children in folder.glob("task/*/children"):
                pids += map(int, children.read_text().split())
            rollup, status = ((folder / name).read_text() for name in ("smaps_rollup", "status"))
            memory[process] = (_kilobytes(rollup, "Pss"), _kilobytes(status, "VmHWM"))
    return memory


def _kilobytes(text: str, key: str) -> int:
    return int(text.split(f"\n{key}:", 1)[1].split()[0]) * 1024


def copies(source: str, count: int, folder: Path) -> str:
    """A corpus of count times the text: links in a new folder, so that it takes no room."""
    if count == 1:
        return source
    folder.mkdir()
    for n in range(count):
        for i, path in enumerate(find_files(source)):
            suffix = ".jsonl" if is_jsonl(path) else ".txt"
            suffix += ".gz" * path.endswith(".gz")
            (folder / f"{n:04d}-{i:06d}{suffix}").symlink_to(os.path.abspath(path))
    return str(folder)


def preparation_table(preparations: dict[int, Preparation]) -> str:
    """Of preparations by how often the text was repeated."""
    rows = []
    for repeat, done in preparations.items():
        megabytes = done.bytes / 1e6
        row = {
            "text": f"{repeat} ×",
            "MB": f"{megabytes:.1f}",
            "documents": f"{done.documents:,}",
            "bytes each": f"{done.bytes / done.documents:,.0f}",
            "tokens": f"{done.tokens:,}",
            "seconds": f"{done.seconds:.1f}",
            "tokenizer": f"{done.tokenizer_seconds:.1f}",
            "packing": f"{done.packing_seconds:.1f}",
            "MB/s": f"{megabytes / done.seconds:.2f}",
            "MB/s per process": f"{megabytes / done.seconds / done.workers:.2f}",
            "MB per CPU second": f"{megabytes / done.cpu_seconds:.2f}",
        }
        for title, peak in ("peak RAM", done.peak_pss), ("sum of peaks", done.sum_of_peaks):
            row[title] = "n/a" if peak is None else f"{peak / 1e6:,.0f} MB"
        rows.append(row)
    workers = next(iter(preparations.values())).workers
    return (
        f"Preparation with {workers} processes, the start of Python and the training of the "
        "tokenizer included, to which copies of a text add nothing. Peak RAM is the largest sum of "
        "all processes' Pss, looked at ten times a second; sum of peaks adds up each one's own.\n\n"
        + table(rows)
    )
