import errno
import io
import sys

from tqdm import tqdm

from common.numbers import counted, memory, progress_bar, size


def test_counts_and_sizes_are_written_with_their_units():
    assert [counted(n, "kv heads") for n in (0, 1, 2)] == ["0 kv heads", "1 kv head", "2 kv heads"]
    assert [counted(n, "processes") for n in (1, 2345)] == ["1 process", "2,345 processes"]
    assert [size(n) for n in (12_140_000, 99_900, 160)] == ["12.1 MB", "99.9 kB", "0.2 kB"]
    assert [size(n) for n in (999_900_000, 67_730_000_000)] == ["999.9 MB", "67.7 GB"]
    assert [memory(n) for n in (3_400_000, 2**30)] == ["3.4 MB", "1.00 GiB"]


class Clock:
    """A fake clock for a progress bar: its time changes only when a test changes `now`."""

    def __init__(self, bar: tqdm):
        self.now, bar._time = bar.start_t, self

    def __call__(self) -> float:
        return self.now


def test_progress_in_a_file_has_one_line_per_minute_and_no_final_line(capsys):
    with progress_bar(8, "step", "step") as bar:
        clock = Clock(bar)
        for number in range(2):
            bar.set_postfix_str(f"loss {number}.5", refresh=False)
            clock.now += 61
            bar.update(2)
            clock.now += 11
            bar.update()
    assert bar.miniters == 1  # with any other value, tqdm's monitor thread prints lines too
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("step 2/8, loss 0.5, ")
    assert second.startswith("step 5/8, loss 1.5, ")
    assert first.endswith(" left")


def test_a_progress_line_that_cannot_be_written_does_not_stop_the_work(monkeypatch):
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "not written")

    monkeypatch.setattr(sys, "stderr", Broken())
    with progress_bar(5, "step", "step") as bar:
        clock = Clock(bar)
        for _ in range(2):
            clock.now += 61
            assert bar.update()  # True: a line was due
