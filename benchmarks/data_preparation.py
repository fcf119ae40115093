"""Preparation, measured from outside: seconds and memory of the command that people type."""

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks import REPOSITORY
from data.corpus import BUILTIN, find_files, is_jsonl
from data.errors import DataError
from data.shards import DESCRIPTION_FILE, read_description
from data.tokenizer import TOKENIZER_FILE

SAMPLE_SECONDS = 0.1  # between looks at the memory: each costs about a millisecond per process


def preparation_row(source: str, out: Path, workers: int) -> dict[str, str]:
    """Run scripts.prepare_data on a corpus into the folder out; what it was and how long it took.

    Its two phases are told by the times at which it finished its files, the tokenizer and then the
    description. MB are 10^6 bytes of UTF-8 text, without the JSON around it.

    Raises:
        DataError: the command refused the text; its own words.
    """
    if source != BUILTIN:
        source = os.path.abspath(source)
    command = [sys.executable, "-m", "scripts.prepare_data", "--data", source, "--out", str(out)]
    command += ["--segmentations", "1"]  # what takes time is encoding
    started = time.time()
    cost = measured([*command, "--workers", str(workers)])
    splits = read_description(out)["splits"].values()
    documents, n_bytes, tokens = (
        sum(split[key] for split in splits) for key in ("documents", "bytes", "tokens")
    )
    megabytes = n_bytes / 1e6
    tokenizer_done = (out / TOKENIZER_FILE).stat().st_mtime
    packing_done = (out / DESCRIPTION_FILE).stat().st_mtime
    return {
        "MB": f"{megabytes:.1f}",
        "documents": f"{documents:,}",
        "bytes each": f"{n_bytes / documents:,.0f}",
        "tokens": f"{tokens:,}",
        "seconds": f"{cost.seconds:.1f}",
        "tokenizer": f"{tokenizer_done - started:.1f}",
        "packing": f"{packing_done - tokenizer_done:.1f}",
        "MB/s": f"{megabytes / cost.seconds:.2f}",
        "MB/s per process": f"{megabytes / cost.seconds / workers:.2f}",
        "MB per CPU second": f"{megabytes / cost.cpu_seconds:.2f}",
        "peak RAM": "n/a" if cost.peak is None else f"{cost.peak / 1e6:,.0f} MB",
        "sum of peaks": "n/a" if cost.peaks is None else f"{cost.peaks / 1e6:,.0f} MB",
    }


class Cost(NamedTuple):
    """Of a command, the start of the interpreter included."""

    seconds: float
    cpu_seconds: float
    peak: int | None  # bytes, see `watch_memory`; None where the system does not tell
    peaks: int | None


def measured(command: list[str]) -> Cost:
    """Raises DataError: it failed, with its own words."""
    cpu_before, started = children_seconds(), time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=output)
        memory = watch_memory(process)
        seconds = time.perf_counter() - started
        output.seek(0)
        words = output.read().decode(errors="replace").split("prepare_data: error: ")[-1].strip()
    if process.returncode:
        raise DataError(words or f"scripts.prepare_data ended with {process.returncode}")
    return Cost(seconds, children_seconds() - cpu_before, *memory)


def children_seconds() -> float:
    """CPU seconds of all processes below this one that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def watch_memory(process: subprocess.Popen) -> tuple[int | None, int | None]:
    """Wait for a process to end; (largest sum of Pss that was seen, sum of all VmHWM), bytes.

    The truth lies between: a peak may fall between two looks, while peaks of single processes need
    not coincide, and count shared pages once for each.
    """
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
