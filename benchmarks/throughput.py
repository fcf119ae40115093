"""Compare the speed of the training step with other projects on the same work.

    python -m benchmarks.throughput --sizes 26m

The first chosen contender in the order of the table, A, is the baseline. It first takes turns
alone. Each other one first takes one turn alone, then turns with A: A B A B A B. If the speed of
the machine drifts, the ratio of two contenders within one round is more reliable than their speeds;
the table has the median of these ratios. At most two contenders are in memory at a time.
--contenders takes names, such as ours-zero2-compiled, and groups: all, ours, peers, transformers
and litgpt. The groups blocks, selective, muon and uncoalesced are variants of ours; `all` and
`ours` omit them.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from zipfile import ZipFile

import torch

from benchmarks.cli import heading, new_parser, say, table
from benchmarks.contenders import Contender, Team, TeamError, all_contenders, select
from benchmarks.ours import synchronize
from benchmarks.turns import NOTE, Turn, record, table_rows
from benchmarks.work import DATA, SIZES, Work
from lm.common.errors import UsageError, one_line_errors, stop_in_order
from lm.engine.hardware import peak_flops, set_threads

PROGRAM = "benchmarks.throughput"
REPEATS = 5  # measurements of each product
# (m, k, n) of products (m, k) × (k, n). Which product is fastest depends on the machine. Of "cpu",
# the second is a feed-forward layer of the 26m model, the third is the output layer of this model.
PRODUCTS = {
    "cpu": ((2048, 2048, 2048), (4096, 512, 1408), (4096, 512, 6400)),
    "cuda": ((4096, 4096, 4096), (8192, 8192, 8192)),
}


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    with one_line_errors(PROGRAM, UsageError):
        options = parse_options(argv)
        print(f"{heading(PROGRAM, argv)}\n\n{NOTE}\n", flush=True)
        missing = []
        for size, work in options.works.items():
            with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
                session = Session(size, work.on(options.data), options, Path(folder))
                try:
                    session.measure()
                finally:  # after an error or Ctrl-C, print the rounds so far
                    session.close()
                    print(session.section(), flush=True)
                missing += [f"{size}: {name}: {why}" for name, why in session.missing.items()]
        if missing:
            raise UsageError(f"not measured to the end: {'; '.join(missing)}")


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Return the flags, with the chosen Contenders, and `works`, which maps a size to its Work.

    Raises UsageError for a wrong flag or an unknown contender.
    """
    n_gpus = torch.cuda.device_count()
    parser = new_parser(PROGRAM, __doc__)
    add = parser.add_argument
    sizes = ["26m", "104m", "360m"] if n_gpus else ["26m", "104m"]
    add("--sizes", nargs="+", choices=SIZES, default=sizes)
    known = "names or groups: all, ours, peers, muon, ..."
    add("--contenders", nargs="+", default=["all"], help=known)
    add("--rounds", type=int, default=5, help="rounds of each contender with the first")
    add("--steps", type=int, default=10 if n_gpus else 3, help="steps per turn")
    add("--warmup_steps", type=int, default=3, help="untimed steps after the first step")
    add("--batch_size", type=int, help="sequences per micro-batch (default: by --sizes)")
    add("--seq_len", type=int, help="tokens per sequence (default: by --sizes)")
    add("--accumulation_steps", type=int, default=1, help="micro-batches per step")
    add("--dtype", choices=("bfloat16", "float32"), help="default: by --sizes")
    add("--processes", type=int, default=n_gpus or 1, help="processes of DDP and ZeRO")
    add("--data", default=DATA, help="folder of prepared text")
    add("--rows", type=Path, help="file to which JSON lines are added during the measurement")
    add("--traces", type=Path, help=".zip to which a trace of each contender of ours is added")
    options = parser.parse_args(argv)
    everybody = all_contenders(options.processes, n_gpus > 0)
    options.contenders = select(everybody, options.contenders)
    shape = ("batch_size", "seq_len", "accumulation_steps", "dtype")
    given = {name: value for name in shape if (value := getattr(options, name)) is not None}
    options.works = {size: replace(SIZES[size], **given) for size in options.sizes}
    return options


class Session:
    """The measurements of the contenders of one size.

    Args:
        size: the name of the work.
        options: see `parse_options`.
        folder: temporary, for logs and traces.
    """

    def __init__(self, size: str, work: Work, options: argparse.Namespace, folder: Path):
        self.size, self.work, self.options, self.folder = size, work, options, folder
        self.turns: list[Turn] = []
        self.missing = {contender.name: "took no turn" for contender in options.contenders}
        self.rounds = 0  # number of rounds that have begun
        self.product_flops = matrix_flops(getattr(torch, work.dtype))
        self._teams: dict[Contender, Team] = {}  # running
        self._first_steps: dict[Contender, float] = {}  # seconds until a team has taken a step

    def measure(self) -> None:
        """Measure all rounds in the order that the module's docstring describes."""
        playing: list[Contender] = []  # the baseline, and another one
        for contender in self.options.contenders:
            playing.append(contender)
            try:
                self._start(contender)
                self._take_turns(contender)
                self._profile(contender)
                for _ in range(self.options.rounds):
                    self._take_turns(*playing)
            except TeamError as error:
                self._drop(error)
                playing.remove(error.contender)
                if error.contender != contender:  # the baseline
                    return
            for other in playing[1:]:
                playing.remove(other)
                self._teams.pop(other).close()

    def close(self) -> None:
        """End every process."""
        for team in self._teams.values():
            team.close()

    def section(self) -> str:
        """Return the Markdown section with the table."""
        work = self.work
        parts = [
            f"### {self.size}: {work.counts[0] / 1e6:.2f} million parameters",
            f"dim {work.dim}, {work.n_layers} layers, {work.n_heads} heads, {work.n_kv_heads} kv "
            f"heads; {work.batch_size} × {work.seq_len} tokens × {work.accumulation_steps} "
            f"accumulation per process and step; {work.dtype}. Matrix products alone reach "
            f"{self.product_flops / 1e12:.3g} TFLOP/s on one device here.",
        ]
        if self.turns:
            parts.append(table(table_rows(self.turns)))
        if self.missing:
            missing = [f"- {name}: {reason}" for name, reason in self.missing.items()]
            parts += ["Not measured to the end:", "\n".join(missing)]
        return "\n\n".join(parts) + "\n"

    def _start(self, contender: Contender) -> None:
        """Start a contender and let it warm up."""
        self._say(contender, "starts")
        (folder := self.folder / contender.name).mkdir()
        team = self._teams[contender] = Team(contender, self.work, folder)
        team.ask(0)  # answered after the first step
        seconds = self._first_steps[contender] = time.monotonic() - team.started
        team.ask(self.options.warmup_steps)
        self._say(contender, f"first step after {seconds:.1f} s")

    def _take_turns(self, *contenders: Contender) -> None:
        """Measure one round."""
        work, on_gpu = self.work, torch.cuda.is_available()
        precision = "bf16" if work.dtype == "bfloat16" else "fp32"
        sheet = peak_flops(torch.cuda.get_device_name(), precision) if on_gpu else None
        self.rounds += 1
        for contender in contenders:
            answers = self._teams[contender].ask(self.options.steps)
            # A step ends when its slowest rank has finished.
            steps = map(max, zip(*(answer["seconds"] for answer in answers), strict=True))
            speed = work.tokens * contender.processes / statistics.median(steps)
            devices = contender.processes if on_gpu else 1
            turn = Turn(
                **self._labels(contender),
                processes=contender.processes,
                round=self.rounds,
                tokens_per_second=speed,
                flops_per_second=speed * work.counts[1],
                peak_flops=sheet and sheet * devices,
                product_flops=self.product_flops * devices,
                peak_bytes=max(answer["peak_bytes"] for answer in answers),
                expected_bytes=answers[0]["expected_bytes"],
                first_step_seconds=self._first_steps[contender],
            )
            self.turns.append(turn)
            record(self.options.rows, "turn", asdict(turn))
            self.missing.pop(contender.name, None)
            self._say(contender, f"{speed:,.0f} tokens/s")

    def _profile(self, contender: Contender) -> None:
        """Let a contender of ours trace one step, if traces are wanted."""
        if self.options.traces is None or contender.family != "ours":
            return
        folder, labels = self.folder / contender.name, self._labels(contender)
        seconds = self._teams[contender].ask(folder)[0]
        rounded = {phase: round(each, 4) for phase, each in seconds.items()}
        record(self.options.rows, "profile", labels | rounded)
        with ZipFile(self.options.traces, "a") as archive:
            for trace in sorted(folder.glob("*.json.gz")):
                archive.write(trace, "-".join([*map(str, labels.values()), trace.name]))

    def _drop(self, error: TeamError) -> None:
        team = self._teams.pop(error.contender)
        team.close()
        reason = self.missing[error.contender.name] = str(error)
        record(self.options.rows, "failure", self._labels(error.contender) | {"reason": reason})
        self._say(error.contender, f"failed: {error}\n{team.last_lines()}")

    def _labels(self, contender: Contender) -> dict:
        accumulation = {"accumulation_steps": self.work.accumulation_steps}
        return {"size": self.size} | accumulation | {"contender": contender.name}

    def _say(self, contender: Contender, text: str) -> None:
        say(f"{self.size}: {contender.name}: {text}")


def matrix_flops(dtype: torch.dtype) -> float:
    """Return the FLOP/s of matrix products: the median of the repeats, for the fastest shape. The
    column "of products" of the table divides by this number."""
    set_threads()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    for m, k, n in PRODUCTS[device.type]:
        a = torch.randn(m, k, device=device).to(dtype)
        b = torch.randn(k, n, device=device).to(dtype)
        # Always write to the same memory, so that no page faults are measured.
        out = torch.empty(m, n, device=device, dtype=dtype)
        torch.mm(a, b, out=out)
        seconds = []
        for _ in range(REPEATS):
            synchronize(device)
            start = time.perf_counter()
            torch.mm(a, b, out=out)
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        found.append(2 * m * k * n / statistics.median(seconds))
    return max(found)


if __name__ == "__main__":
    main()
