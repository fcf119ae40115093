import json
from dataclasses import asdict

import pytest
from test_benchmarks_contenders import LLAMA, LLAMA_COMPILED, OURS, OURS_COMPILED

from benchmarks.contenders import Contender
from benchmarks.report import Result, SizeReport, closing_line, compare, ratios, size_table
from benchmarks.work import SIZES


def result(contender, seconds, tokens=1000):
    return Result(contender, tokens, first_step_seconds=2.5, step_seconds=seconds, peak_bytes=2**30)


def report(*results, gpu=None, **missing):
    products = [(1e12, "1 × 2 × 3"), (3e12, "3 × 2 × 1"), (2e12, "1 × 2 × 3")]
    return SizeReport("26m", SIZES["26m"], gpu, list(results), missing, products, 3, finished=True)


def rows(found: SizeReport) -> list[dict]:
    """The table's cells by their titles."""
    lines = [line for line in size_table(found).splitlines() if line.startswith("| ")]
    titles, _, *cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(titles, row, strict=True)) for row in cells]


def test_a_ratio_is_the_median_of_the_rounds_ratios_not_the_ratio_of_medians():
    # The machine is three times as slow in the last round, for both.
    ours = result(OURS, {1: 1.0, 2: 1.1, 3: 3.0})
    peer = result(LLAMA, {1: 1.5, 2: 1.76, 3: 4.8})
    assert ratios(ours, peer) == pytest.approx([1.5, 1.6, 1.6])
    assert rows(report(peer, ours))[1]["against transformers-eager"] == "1.600 (1.500 to 1.600)"
    twice_the_tokens = result(Contender("ours", False, "ddp", processes=2), {3: 3.0}, tokens=2000)
    assert ratios(twice_the_tokens, peer) == pytest.approx([3.2])
    assert ratios(result(OURS, {7: 1.0}), peer) == []


def test_the_closing_line_takes_the_fastest_of_each_side_and_compares_allocators_apart():
    found = report(
        result(OURS, {1: 1.0, 2: 1.0}),
        result(OURS_COMPILED, {1: 0.5, 2: 0.5}),
        result(Contender("ours", True, "zero2", processes=2), {1: 0.1, 2: 0.1}),
        result(Contender("ours", True, fused=True), {1: 0.1, 2: 0.1}),
        result(LLAMA, {1: 1.2, 2: 1.2}),
        result(LLAMA_COMPILED, {1: 0.8, 2: 0.82}),
        result(Contender("litgpt", True, our_allocator=True), {1: 0.75, 2: 0.76}),
    )
    assert closing_line(found) == (
        "26m, ours / fastest peer: 1.62 (ours-compiled / transformers-compiled), "
        "same allocator 1.51 (litgpt-compiled+allocator)"
    )


def test_without_peers_the_closing_line_says_so():
    assert "n/a" in closing_line(report(result(OURS, {1: 1.0})))


def test_contenders_that_never_met_are_compared_by_way_of_the_baseline():
    # ours-compiled was measured while the machine was half as fast.
    ours, peer = result(OURS_COMPILED, {2: 1.0}), result(LLAMA, {1: 1.0})
    found = report(result(OURS, {1: 1.0, 2: 2.0}), ours, peer)
    assert compare(found, ours, peer) == pytest.approx(2.0)


def test_where_the_baseline_has_failed_the_table_does_without():
    found = report(result(OURS, {1: 1.0}), result(LLAMA, {2: 2.0}), **{"ours-compiled": "died"})
    assert rows(found)[1]["against ours-eager"] == "n/a"
    assert "2.00 (ours-eager / transformers-eager)" in size_table(found)


def test_the_table_has_every_contender_and_the_reason_of_every_missing_one():
    found = report(result(OURS, {1: 0.5}), result(LLAMA, {1: 1.0}), litgpt="not installed")
    ours, peer = rows(found)
    assert ours["tokens/s"].startswith("2,000 ")
    assert (ours["against ours-eager"], peer["against ours-eager"][:5]) == ("1", "0.500")
    teraflops = 2000 * SIZES["26m"].counts[1] / 1e12
    assert float(ours["TFLOP/s"]) == pytest.approx(teraflops, rel=1e-2)
    assert ours["of measured peak"] == f"{teraflops / 2:.1%}"  # the median of 1, 2 and 3
    assert (ours["memory, GiB"], ours["first step, s"]) == ("1.00", "2.5")
    assert "- litgpt: not installed" in size_table(found).splitlines()


def test_every_number_can_be_written_as_json():
    found = report(result(OURS, {1: 0.5}))
    written = json.loads(json.dumps(asdict(found)))
    assert written["results"][0]["step_seconds"] == {"1": 0.5}
    assert written["work"]["dim"] == 512


def test_the_share_of_exchange_can_be_read_off_beside_processes_on_their_own():
    found = report(
        result(Contender("ours", True, "alone", processes=2), {1: 1.0, 2: 2.0}),
        result(Contender("ours", True, "zero2", processes=2), {1: 1.25, 2: 2.5}),
    )
    assert rows(found)[1]["against ours-alone-compiled"].startswith("0.800 ")


def test_mfu_is_the_share_of_the_data_sheet_where_that_is_known():
    ddp = Contender("ours", False, "ddp", processes=2)
    found = report(result(OURS, {1: 0.001}), result(ddp, {1: 0.001}), gpu="NVIDIA A100-SXM4")
    teraflops = 1e6 * SIZES["26m"].counts[1] / 1e12
    assert [row["MFU"] for row in rows(found)] == [
        f"{teraflops / 312:.1%}",
        f"{teraflops / 312 / 2:.1%}",
    ]
