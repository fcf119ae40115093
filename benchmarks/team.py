"""The worker processes of one contender, seen from the parent."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 3600  # for one command: compiling a large model takes minutes, a hang takes forever
LOG_LINES = 15


class TeamError(Exception):
    """A contender cannot go on. `log` is the end of what its failed process printed."""

    def __init__(self, reason: str, log: str = ""):
        super().__init__(reason)
        self.log = log


class Team:
    """One process per rank, all carrying out the same command at the same time.

    Each is the leader of a process session of its own: Ctrl-C in a terminal reaches the parent
    alone, which then ends them, with the compilers and helpers that they have started.

    Args:
        environments: the environment of each rank.
        folder: where their output goes.
    """

    def __init__(self, environments: list[dict[str, str]], folder: Path):
        self.started = time.monotonic()
        self._processes: list[subprocess.Popen] = []
        self._answers: list[int] = []  # file descriptors
        self._logs: list[Path] = []
        self._unread: list[bytes] = []
        try:
            for rank, environment in enumerate(environments):
                self._start(environment, folder / f"rank{rank}.log")
        except BaseException:
            self.close()
            raise

    def ask(self, command: dict, limit: float = LIMIT_SECONDS) -> list[dict]:
        """Give all ranks the command; returns their answers by rank.

        Raises:
            TeamError: an error in one of them, its death, or no answer in `limit` seconds. All
                processes have then been ended.
        """
        line = json.dumps(command).encode() + b"\n"
        try:
            for rank, process in enumerate(self._processes):
                try:
                    process.stdin.write(line)
                    process.stdin.flush()
                except BrokenPipeError:
                    self._fail(rank)
            return self._collect(time.monotonic() + limit)
        except TeamError:
            self.close()
            raise

    def close(self) -> None:
        """End all processes that are still there, and the helpers that share their groups.

        A process that has ended but was not waited for keeps its number, so no stranger is hit.
        """
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
            with suppress(OSError):
                process.stdin.close()
        for fd in self._answers:
            os.close(fd)
        self._processes, self._answers = [], []

    def _start(self, environment: dict[str, str], log: Path) -> None:
        reading, writing = os.pipe()
        self._answers.append(reading)
        self._logs.append(log)
        self._unread.append(b"")
        try:
            with open(log, "wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.worker", str(writing)],
                    cwd=REPOSITORY,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[writing],
                    start_new_session=True,
                )
        finally:
            os.close(writing)
        self._processes.append(process)

    def _collect(self, deadline: float) -> list[dict]:
        answers: dict[int, dict] = {}
        with selectors.DefaultSelector() as selector:
            for rank, fd in enumerate(self._answers):
                selector.register(fd, selectors.EVENT_READ, rank)
            while len(answers) < len(self._processes):
                # Not for long: a process may die while a child of its keeps the pipe open.
                for key, _ in selector.select(timeout=1.0):
                    if answer := self._read(key.data):
                        answers[key.data] = answer
                        selector.unregister(key.fd)
                for rank, process in enumerate(self._processes):
                    if rank not in answers and process.poll() is not None:
                        answers[rank] = self._read(rank) or self._fail(rank)
                if time.monotonic() > deadline:
                    rank = min(set(range(len(self._processes))) - set(answers))
                    raise TeamError("no answer in time", self._end_of_log(rank))
        return [answers[rank] for rank in sorted(answers)]

    def _read(self, rank: int) -> dict | None:
        """The answer of a rank, None while it is not complete."""
        while b"\n" not in self._unread[rank]:
            os.set_blocking(self._answers[rank], False)
            try:
                data = os.read(self._answers[rank], 2**16)
            except BlockingIOError:
                return None
            if not data:
                self._fail(rank)
            self._unread[rank] += data
        line, _, self._unread[rank] = self._unread[rank].partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise TeamError(answer["error"], self._end_of_log(rank))
        return answer

    def _fail(self, rank: int):
        """Raise what is known about the death of a rank."""
        try:
            code = self._processes[rank].wait(5)
        except subprocess.TimeoutExpired:
            code = None
        reason = f"its process ended with exit code {code}"
        if code == -signal.SIGKILL:
            reason = "its process was killed, as happens when memory runs out"
        elif code is not None and code < 0:
            reason = f"its process ended by {signal.Signals(-code).name}"
        raise TeamError(reason, self._end_of_log(rank))

    def _end_of_log(self, rank: int) -> str:
        text = self._logs[rank].read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-LOG_LINES:])
