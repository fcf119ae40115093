"""One size measured: contenders started, warmed up, and given turns."""

import argparse
import socket
import statistics
import sys
import time
from pathlib import Path

import torch

from benchmarks.contenders import Contender, environments, obstacle
from benchmarks.matmul import MatrixProducts
from benchmarks.report import Result, SizeReport
from benchmarks.team import Team, TeamError
from benchmarks.work import Work
from training.engine.memory import free_memory

BASELINES = ("ours-compiled", "ours-eager")  # the first of them that takes part, or anybody
# How an engine must call itself, for engines are known to be switched off without a word.
ENGINE_NAMES = {
    "single": "single process",
    "alone": "single process",
    "ddp": "DDP",
    "zero1": "DeepSpeed ZeRO-1",
    "zero2": "DeepSpeed ZeRO-2",
}


class Session:
    """Measures the contenders of one size.

    All that fit into memory together are alive at the same time and take turns. Where not all do,
    some play their rounds, make room, and the next play theirs; the baseline plays in every round,
    so that ratios to it are always taken within a round. Each one's first round, with the baseline
    alone, is played as soon as it is up: whatever ends the session early leaves that much.

    Args:
        size: its name.
        work: what each contender does.
        options: contenders, in the order of the table; rounds, steps, warmup_steps, trace and
            keep_compile_cache of benchmarks.throughput.
        folder: temporary, for logs, DeepSpeed files and compiled code.
    """

    def __init__(self, size: str, work: Work, options: argparse.Namespace, folder: Path):
        self.work, self.options, self.folder = work, options, folder
        self._products = MatrixProducts(getattr(torch, work.dtype))
        on_gpu = self._products.device.type == "cuda"
        self.report = SizeReport(size, work, torch.cuda.get_device_name() if on_gpu else None)
        self._teams: dict[Contender, Team] = {}  # alive, the baseline first
        self._results: dict[Contender, Result] = {}  # of theirs

    def close(self) -> None:
        """End every process."""
        for team in self._teams.values():
            team.close()
        self._teams = {}

    def measure(self) -> None:
        """Everything, in the order described above, into `report`."""
        waiting = self._able()
        self._measure_products()
        while waiting:
            while waiting and self._has_room():
                contender = waiting.pop(0)
                self._start(contender)
                if contender in self._teams:
                    baseline = next(iter(self._teams))
                    self._play_round(list(dict.fromkeys((baseline, contender))))
            for _ in range(self.options.rounds - 1):
                self._play_round(list(self._teams))
            for contender in list(self._teams)[1 if waiting else 0 :]:
                if self.options.trace:
                    self._trace(contender)
                self._teams.pop(contender).close()
        self._measure_products()
        self.report.finished = True

    def _able(self) -> list[Contender]:
        """Those that nothing known stands in the way of, the baseline first."""
        reasons = {contender: obstacle(contender) for contender in self.options.contenders}
        self.report.missing = {c.name: r or "no time left" for c, r in reasons.items()}
        able = [contender for contender, reason in reasons.items() if reason is None]
        rank = {name: position for position, name in enumerate(BASELINES)}
        return sorted(able, key=lambda contender: rank.get(contender.name, len(rank)))

    def _measure_products(self) -> None:
        self.report.matrix_products.append(self._products.peak())

    def _has_room(self) -> bool:
        """Whether one more can join those that are alive, judged by the largest so far.

        On a CPU there must be room for two: what peers give back after a turn they take again in
        the next. The baseline never stays alone: what does not fit beside it fails.
        """
        free = free_memory(self._products.device)
        if free is None or len(self._teams) < 2:
            return True
        results = self._results.values()
        if self.report.gpu:
            return free > 1.3 * max(result.peak_bytes for result in results)
        return free > 2 * max(result.peak_bytes * result.contender.processes for result in results)

    def _start(self, contender: Contender) -> None:
        folder = self.folder / contender.name
        folder.mkdir()
        fresh = not self.options.keep_compile_cache
        environment = environments(contender, free_port(), folder, fresh)
        try:
            team = self._teams[contender] = Team(environment, folder)
            first = team.ask((contender, self.work))[0]
            seconds = time.monotonic() - team.started
            wanted = ENGINE_NAMES[contender.engine]
            if not first["engine"].startswith(wanted):
                raise TeamError(f"runs as {first['engine']!r}, not as {wanted}")
            if self.options.warmup_steps:
                team.ask(self.options.warmup_steps)
        except TeamError as error:
            self._drop(contender, error)
            return
        tokens = self.work.tokens * contender.processes
        result = Result(contender, tokens, seconds, first["peak_bytes"], [first["loss"]])
        self._results[contender] = result
        self.report.results.append(result)
        self._say(f"{contender.name}: first step after {seconds:.1f} s")

    def _play_round(self, contenders: list[Contender]) -> None:
        self.report.rounds += 1
        self._measure_products()
        said = []
        for contender in contenders:
            try:
                self._turn(contender)
            except TeamError as error:
                self._drop(contender, error)
                continue
            said.append(f"{contender.name} {self._results[contender].speeds()[-1]:,.0f}")
        self._say(f"round {self.report.rounds}, tokens/s: {', '.join(said)}")

    def _turn(self, contender: Contender) -> None:
        result = self._results[contender]
        answers = self._teams[contender].ask(self.options.steps)
        # A step is over when its slowest rank is done.
        steps = map(max, zip(*(answer["seconds"] for answer in answers), strict=True))
        result.step_seconds[self.report.rounds] = statistics.median(steps)
        result.losses.append(answers[0]["loss"])
        result.peak_bytes = max(answer["peak_bytes"] for answer in answers)
        self.report.missing.pop(contender.name, None)

    def _trace(self, contender: Contender) -> None:
        """Record a step, when nothing more is measured: a process may remain slower after it."""
        name = f"{self.report.size}-{contender.name}.json.gz".replace("+", "-")
        try:
            self._teams[contender].ask((self.options.trace / name).absolute())
        except TeamError as error:
            self._say(f"{contender.name} left no trace: {error}")

    def _drop(self, contender: Contender, error: TeamError) -> None:
        """Count it out, and show why."""
        if team := self._teams.pop(contender, None):
            team.close()
        if result := self._results.pop(contender, None):
            self.report.results.remove(result)
        self.report.missing[contender.name] = str(error)
        self._say(f"{contender.name} failed: {error}")
        if error.log:
            print("    " + error.log.replace("\n", "\n    "), file=sys.stderr, flush=True)

    def _say(self, text: str) -> None:
        print(f"{self.report.size}: {text}", file=sys.stderr, flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
