"""The worker processes of one contender, seen from the parent."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

from benchmarks import REPOSITORY

LOG_LINES = 15


class TeamError(Exception):
    """A contender cannot go on. `log` is the end of what its failed process printed."""

    def __init__(self, reason: str, log: str = ""):
        super().__init__(reason)
        self.log = log


@dataclass
class Rank:
    process: subprocess.Popen
    connection: Connection  # see benchmarks.worker
    log: Path

    def answer(self) -> dict:
        """Raises TeamError: an error instead of an answer, or the end of the process."""
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            code = self.process.wait()
            killed = ", killed as when memory runs out" if code == -signal.SIGKILL else ""
            answer = {"error": f"its process ended with exit code {code}{killed}"}
        if "error" in answer:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            raise TeamError(answer["error"], "\n".join(lines[-LOG_LINES:]))
        return answer


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
        self._ranks: list[Rank] = []
        try:
            for number, environment in enumerate(environments):
                self._start(environment, folder / f"rank{number}.log")
        except BaseException:
            self.close()
            raise

    def _start(self, environment: dict[str, str], log: Path) -> None:
        ours, theirs = Pipe()
        with open(log, "wb") as output, theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.worker", str(theirs.fileno())],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._ranks.append(Rank(process, ours, log))

    def ask(self, question) -> list[dict]:
        """Send all ranks the same; returns their answers by rank.

        Raises:
            TeamError: an error in one of them, or its end. All processes have then been ended.
        """
        ranks = {rank.connection: rank for rank in self._ranks}
        answers = {}
        try:
            for connection in ranks:
                with suppress(BrokenPipeError):  # the end of its process comes out below
                    connection.send(question)
            while unanswered := ranks.keys() - answers.keys():
                for connection in wait(unanswered):
                    answers[connection] = ranks[connection].answer()
        except TeamError:
            self.close()
            raise
        return [answers[connection] for connection in ranks]

    def close(self) -> None:
        """End all processes that are still there, and the helpers that share their groups.

        A process that has ended but was not waited for keeps its number, so no stranger is hit.
        """
        for rank in self._ranks:
            if rank.process.poll() is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.process.pid, signal.SIGKILL)
        for rank in self._ranks:
            rank.process.wait()
            rank.connection.close()
        self._ranks = []
