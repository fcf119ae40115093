"""Speed of this project's training step and its peers' on the same work, in one run.

    python -m benchmarks.throughput --sizes 26m

Each contender takes turns with the first one, the baseline: A B A B A B, then A C A C A C. On a
machine whose speed drifts, single figures are worth little, but two contenders' ratio within one
round is worth something, and its median over rounds more. Two contenders are in memory at a time.
Besides names, such as ours-zero2-compiled, --contenders takes groups: all, ours, peers, and the
variants of ours that `all` does not mean: blocks, selective, muon.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.cli import at_least, heading, names, new_parser, say
from benchmarks.contenders import Contender, all_contenders, select
from benchmarks.matmul import matrix_flops
from benchmarks.report import NOTE, Result, SizeReport, size_table
from benchmarks.team import Team, TeamError
from benchmarks.work import DATA, SIZES, find_data
from common.errors import UsageError, one_line_errors, stop_in_order

PROGRAM = "benchmarks.throughput"
BASELINES = ("ours-compiled", "ours-eager")  # the first of them that takes part, or anybody


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    with one_line_errors(PROGRAM, UsageError):
        options = parse_options(argv)
        data = find_data(options.data)
        print(f"{heading(PROGRAM, argv)}\n\n{NOTE}\n", flush=True)
        for size, work in options.works.items():
            report = SizeReport(size, replace(work, data=data))
            with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
                session = Session(report, options, Path(folder))
                try:
                    session.measure()
                finally:  # whatever ends it early leaves the rounds that were played
                    session.close()
                    print(size_table(report), flush=True)


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Return the flags, with the chosen Contenders, and `works`, a Work by size.

    Raises UsageError: a value that cannot work.
    """
    n_gpus = torch.cuda.device_count()
    parser = new_parser(PROGRAM, __doc__)
    add, number = parser.add_argument, at_least(1)
    sizes = "26m,104m,360m" if n_gpus else "26m,104m"
    add("--sizes", type=names(SIZES), default=sizes, help=f"of {', '.join(SIZES)}")
    add("--contenders", default="all", help="names or groups: all, ours, peers, muon, ...")
    add("--rounds", type=number, default=5, help="turns of each contender")
    add("--steps", type=number, default=10 if n_gpus else 3, help="steps per turn")
    add("--warmup_steps", type=at_least(0), default=3, help="steps before the first turn")
    add("--batch_size", type=number, help="sequences per micro-batch (default: the size's)")
    add("--seq_len", type=number, help="tokens per sequence (default: the size's)")
    add("--accumulation_steps", type=number, default=1, help="micro-batches per step")
    add("--processes", type=number, default=n_gpus or 1, help="of DDP and ZeRO")
    add("--data", default=DATA, help="folder of prepared text")
    text = "use PyTorch's compile cache and not an empty one: first steps are no first run's"
    add("--keep_compile_cache", action="store_true", help=text)
    options = parser.parse_args(argv)
    if 0 < n_gpus < options.processes:
        raise UsageError(f"--processes {options.processes} is more than the {n_gpus} GPUs")
    everybody = all_contenders(options.processes, n_gpus > 0)
    options.contenders = select(everybody, options.contenders)
    shape = ("batch_size", "seq_len", "accumulation_steps")
    given = {name: value for name in shape if (value := getattr(options, name)) is not None}
    options.works = {size: replace(SIZES[size], **given) for size in options.sizes}
    return options


class Session:
    """Measure the contenders of one size.

    Args:
        report: what is measured goes there.
        options: see `parse_options`.
        folder: temporary, for logs and compiled code.
    """

    def __init__(self, report: SizeReport, options: argparse.Namespace, folder: Path):
        self.report, self.options, self.folder = report, options, folder
        self._teams: dict[Contender, Team] = {}  # alive

    def measure(self) -> None:
        """Play all rounds in the order of the module's first lines."""
        rank = {name: position for position, name in enumerate(BASELINES)}
        waiting = sorted(self.options.contenders, key=lambda c: rank.get(c.name, len(rank)))
        self.report.missing = {contender.name: "no time left" for contender in waiting}
        while waiting and not self._teams:
            self._start(waiting.pop(0))
        if not self._teams:
            return
        (baseline,) = self._teams
        for contender in waiting:
            if self._start(contender):
                self._play([baseline, contender])
            if team := self._teams.pop(contender, None):
                team.close()
            if baseline not in self._teams:
                return
        if not self.report.result(baseline).step_seconds:  # nobody else could start
            self._play([baseline])
        self.report.finished = True

    def close(self) -> None:
        """End every process."""
        for team in self._teams.values():
            team.close()

    def _start(self, contender: Contender) -> bool:
        """Start a contender and let it warm up; return whether it can take turns."""
        (folder := self.folder / contender.name).mkdir()
        fresh = not self.options.keep_compile_cache
        team = self._teams[contender] = Team(contender, self.report.work, folder, fresh)
        try:
            team.take(0)  # answered after the first step
            seconds = time.monotonic() - team.started
            team.take(self.options.warmup_steps)
        except TeamError as error:
            self._drop(contender, error)
            return False
        self.report.results.append(Result(contender, self.report.work, seconds))
        self._say(f"{contender.name}: first step after {seconds:.1f} s")
        return True

    def _play(self, contenders: list[Contender]) -> None:
        """Play all rounds of these contenders, until one of them fails."""
        dtype = getattr(torch, self.report.work.dtype)
        for _ in range(self.options.rounds):
            self.report.rounds += 1
            self.report.matrix_products.append(matrix_flops(dtype))
            for contender in contenders:
                try:
                    answers = self._teams[contender].take(self.options.steps)
                except TeamError as error:
                    self._drop(contender, error)
                    return
                # A step is over when its slowest rank is done.
                steps = map(max, zip(*(answer["seconds"] for answer in answers), strict=True))
                result = self.report.result(contender)
                result.step_seconds[self.report.rounds] = statistics.median(steps)
                result.peak_bytes = max(answer["peak_bytes"] for answer in answers)
                self.report.missing.pop(contender.name, None)
                self._say(f"{contender.name}: {result.speeds()[-1]:,.0f} tokens/s")

    def _drop(self, contender: Contender, error: TeamError) -> None:
        team = self._teams.pop(contender)
        team.close()
        self.report.missing[contender.name] = str(error)
        self._say(f"{contender.name} failed: {error}\n{team.last_words()}")

    def _say(self, text: str) -> None:
        say(f"{self.report.size}: {text}")


if __name__ == "__main__":
    main()
