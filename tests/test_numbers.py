from lm.common.numbers import counted, memory, progress_bar, size


def test_counts_and_sizes_are_written_with_their_units():
    assert [counted(n, "kv heads") for n in (0, 1, 2)] == ["0 kv heads", "1 kv head", "2 kv heads"]
    assert [counted(n, "processes") for n in (1, 2345)] == ["1 process", "2,345 processes"]
    assert [size(n) for n in (12_140_000, 99_900, 160)] == ["12.1 MB", "99.9 kB", "0.2 kB"]
    assert [size(n) for n in (999_900_000, 67_730_000_000)] == ["999.9 MB", "67.7 GB"]
    assert [memory(n) for n in (3_400_000, 2**30)] == ["3.4 MB", "1.00 GiB"]


def test_progress_in_a_file_appears_once_per_minute(capsys):
    now = 0.0
    with progress_bar(8, "step", "step") as bar:
        now, bar._time = bar.start_t, lambda: now
        for seconds in (30, 31, 30, 31, 30):
            now += seconds
            bar.update()
    drawn = [text for text in capsys.readouterr().err.split("\r") if text.strip()]
    assert [text[: text.index("%")] for text in drawn[:2]] == ["step:  25", "step:  50"]
    with progress_bar(8, "step", "step") as bar:
        bar.update(8)
    assert capsys.readouterr().err == ""  # short work prints nothing
