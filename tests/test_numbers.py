from common.numbers import counted, size


def test_one_of_a_kind_is_singular():
    assert [counted(n, "kv heads") for n in (0, 1, 2)] == ["0 kv heads", "1 kv head", "2 kv heads"]
    assert [counted(n, "processes") for n in (1, 2)] == ["1 process", "2 processes"]
    assert counted(12345, "documents") == "12,345 documents"


def test_a_size_never_reads_as_nothing():
    assert [size(n) for n in (12_140_000, 100_000, 99_900)] == ["12.1 MB", "0.1 MB", "99.9 kB"]
    assert [size(n) for n in (999_900_000, 67_730_000_000)] == ["999.9 MB", "67.7 GB"]
    assert size(160) == "0.2 kB"
