"""One size measured: contenders started, warmed up, and given turns."""

import socket
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders import Contender, environments, obstacle, vars_of
from benchmarks.report import Result, SizeReport
from benchmarks.team import Team, TeamError
from benchmarks.work import Work
from training.engine.device import peak_flops
from training.engine.memory import GIB

BASELINES = ("ours-compiled", "ours-eager")  # preferred in this order, if none is named
# How an engine must call itself, for engines are known to be switched off without a word.
ENGINE_NAMES = {
    "single": "single process",
    "alone": "single process",
    "ddp": "DDP",
    "zero1": "DeepSpeed ZeRO-1",
    "zero2": "DeepSpeed ZeRO-2",
}


@dataclass(frozen=True)
class Plan:
    """How to measure, the same for every size."""

    contenders: list[Contender]  # in the order of the table
    baseline: str | None  # name; None for the first of BASELINES that runs
    rounds: int
    steps: int  # per turn
    warmup_steps: int
    our_flags: str  # more flags of the training script, as typed in a shell
    fresh_compile: bool  # whether compiled code of earlier runs is out of reach
    n_gpus: int


class Session:
    """Measures the contenders of one size.

    All that fit into memory together are alive at the same time and take turns. Where not all do,
    some play their rounds, make room, and the next play theirs; the baseline plays in every round,
    so that ratios to it are always taken within a round.

    Args:
        size: its name.
        work: what each contender does.
        plan: how often.
        folder: temporary, for logs, DeepSpeed files and compiled code.
    """

    def __init__(self, size: str, work: Work, plan: Plan, folder: Path):
        self.size, self.work, self.plan, self.folder = size, work, plan, folder
        self.device: dict = {}  # what the first worker says: device, device_name, threads
        self._round = 0
        self._peaks: list[dict] = []
        self._teams: dict[Contender, Team] = {}  # alive, the baseline first
        self._results: dict[Contender, Result] = {}
        self._missing: dict[str, str] = {}
        self._yardstick: Team | None = None
        self._finished = False

    def close(self) -> None:
        """End every process."""
        for team in [*self._teams.values(), *([self._yardstick] if self._yardstick else [])]:
            team.close()
        self._teams, self._yardstick = {}, None

    @property
    def measured_something(self) -> bool:
        return bool(self._peaks)

    def measure(self) -> None:
        """Everything, in the order described above; `report` tells the result.

        Raises:
            TeamError: not even matrix products run.
        """
        queue = self._queue()
        self._start_yardstick()
        self._measure_peak()
        while queue:
            self._start_what_fits(queue)
            if self._teams:
                self._play_rounds()
            self._dismiss(keep_baseline=bool(queue))
        self._measure_peak()
        self._finished = True

    def _queue(self) -> list[Contender]:
        """Those that nothing known stands in the way of, the baseline first."""
        able = []
        for contender in self.plan.contenders:
            if reason := obstacle(contender, self.plan.n_gpus):
                self._missing[contender.name] = reason
            else:
                able.append(contender)
        preferred = [self.plan.baseline] if self.plan.baseline else list(BASELINES)
        rank = {name: position for position, name in enumerate(preferred)}
        return sorted(able, key=lambda contender: rank.get(contender.name, len(rank)))

    def _start_yardstick(self) -> None:
        contender = Contender("matmul", compiled=False)
        folder = self._folder("matmul")
        self._yardstick = Team(environments(contender, 0, folder, fresh=False), folder)
        build = {"command": "build", "kind": "matmul", "work": vars_of(self.work), "options": {}}
        self.device = self._yardstick.ask(build)[0]

    def _measure_peak(self) -> None:
        self._peaks += self._yardstick.ask({"command": "peak"})

    def _start_what_fits(self, queue: list[Contender]) -> None:
        """Take contenders from the queue until the next one has to wait for room."""
        while queue:
            if reason := self._too_large(queue[0]):
                if len(self._teams) > 1:
                    return
                self._missing[queue.pop(0).name] = reason
            else:
                self._start(queue.pop(0))

    def _too_large(self, contender: Contender) -> str | None:
        """Why the contender cannot join those that are alive, None if it can."""
        free = self._yardstick.ask({"command": "memory"})[0]["free"]
        if free is None:
            return None
        on_gpu = self.device["device"] == "cuda"
        expected = contender.expected_bytes(self.work, on_gpu)
        if on_gpu:
            expected //= contender.processes  # each has a GPU
        else:  # with glibc's settings what is free now is partly taken again in the others' turns
            returned = [c for c in self._teams if not c.is_ours and c.allocator == "default"]
            free -= max((c.expected_bytes(self.work, on_gpu) for c in returned), default=0)
        if expected <= free:
            return None
        return f"takes about {expected / GIB:.1f} GiB, and {max(0, free) / GIB:.1f} GiB are free"

    def _start(self, contender: Contender) -> None:
        folder, plan = self._folder(contender.name), self.plan
        environment = environments(contender, free_port(), folder, plan.fresh_compile)
        try:
            team = self._teams[contender] = Team(environment, folder)
            built = team.ask(contender.build_command(self.work, plan.our_flags))[0]
            seconds = time.monotonic() - team.started
            wanted = ENGINE_NAMES[contender.engine]
            if not built["engine"].startswith(wanted):
                raise TeamError(f"runs as {built['engine']!r}, not as {wanted}")
            if plan.warmup_steps:
                team.ask({"command": "steps", "number": plan.warmup_steps})
        except TeamError as error:
            self._drop(contender, error)
            return
        self._results[contender] = Result(
            contender,
            tokens_per_step=self.work.tokens * contender.processes,
            first_step_seconds=seconds,
            threads=built["threads"],
            losses=[built["loss"]],
        )
        self._say(f"{contender.name}: first step after {seconds:.1f} s")

    def _play_rounds(self) -> None:
        for number in range(1, self.plan.rounds + 1):
            self._round += 1
            self._measure_peak()
            said = []
            for contender in list(self._teams):
                try:
                    self._turn(contender)
                except TeamError as error:
                    self._drop(contender, error)
                    continue
                result = self._results[contender]
                said.append(f"{contender.name} {result.speeds()[-1]:,.0f}")
            self._say(f"round {number}/{self.plan.rounds}, tokens/s: {', '.join(said)}")

    def _turn(self, contender: Contender) -> None:
        team, result = self._teams[contender], self._results[contender]
        answers = team.ask({"command": "steps", "number": self.plan.steps})
        # A step is over when its slowest rank is done.
        steps = map(max, zip(*(answer["seconds"] for answer in answers), strict=True))
        result.step_seconds[self._round] = statistics.median(steps)
        result.losses[1:] = [answers[0]["loss"]]
        memory = team.ask({"command": "memory"})
        result.peak_bytes = max(answer["peak"] for answer in memory)

    def _dismiss(self, keep_baseline: bool) -> None:
        kept = list(self._teams)[:1] if keep_baseline else []
        for contender in [item for item in self._teams if item not in kept]:
            self._teams.pop(contender).close()

    def _drop(self, contender: Contender, error: TeamError) -> None:
        """Count it out, and show why."""
        if team := self._teams.pop(contender, None):
            team.close()
        self._results.pop(contender, None)
        self._missing[contender.name] = str(error)
        self._say(f"{contender.name} failed: {error}")
        if error.log:
            print("    " + error.log.replace("\n", "\n    "), file=sys.stderr, flush=True)

    def report(self) -> SizeReport:
        """What was measured; after an interruption, the rounds up to it."""
        order = self.plan.contenders.index
        played = [contender for contender in self._results if self._results[contender].step_seconds]
        results = [self._results[contender] for contender in sorted(played, key=order)]
        met = [contender.name for contender in played]  # by start: the baseline is first
        names = [contender.name for contender in self.plan.contenders]
        waiting = dict.fromkeys(set(names) - set(met), "stopped before its first turn")
        missing = waiting | self._missing
        peak_known = self.device["device"] == "cuda" and self.work.dtype == "bfloat16"
        return SizeReport(
            size=self.size,
            work=self.work,
            baseline=met[0] if met else "",
            results=results,
            missing={name: missing[name] for name in names if name in missing},
            measured_peaks=[peak["flops"] for peak in self._peaks],
            peak_shape=self._peaks[0]["shape"],
            sheet_peak=peak_flops(self.device["device_name"]) if peak_known else None,
            devices_shared=self.device["device"] == "cpu",
            stopped_after=None if self._finished else self._round,
        )

    def _folder(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir()
        return path

    def _say(self, text: str) -> None:
        print(f"{self.size}: {text}", file=sys.stderr, flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
