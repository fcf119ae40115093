import json

import pytest
from test_benchmarks_contenders import LLAMA, LLAMA_COMPILED, OURS, OURS_COMPILED

from benchmarks.contenders import Contender
from benchmarks.report import (
    Result,
    SizeReport,
    closing,
    closing_line,
    communication,
    ratio,
    size_json,
    size_table,
)
from benchmarks.work import SIZES


def result(contender, seconds, tokens=1000):
    return Result(contender, tokens, first_step_seconds=2.5, step_seconds=seconds, peak_bytes=2**30)


def report(*results, **missing):
    return SizeReport(
        "26m", SIZES["26m"], results[0].name, list(results), missing,
        measured_peaks=[1e12, 3e12, 2e12], peak_shape="1 × 2 × 3", sheet_peak=None,
        devices_shared=True,
    )  # fmt: skip


def test_a_ratio_is_the_median_of_the_rounds_ratios_not_the_ratio_of_medians():
    # The machine is three times as slow in the last round, for both.
    ours = result(OURS, {1: 1.0, 2: 1.1, 3: 3.0})
    peer = result(LLAMA, {1: 1.5, 2: 1.76, 3: 4.8})
    assert ratio(ours, peer) == pytest.approx((1.6, 1.5, 1.6))
    twice_the_tokens = result(Contender("ours", False, "ddp", processes=2), {3: 3.0}, tokens=2000)
    assert ratio(twice_the_tokens, peer) == pytest.approx((3.2, 3.2, 3.2))
    assert ratio(result(OURS, {7: 1.0}), peer) is None


def test_the_closing_line_takes_the_fastest_of_each_side_and_compares_allocators_apart():
    found = report(
        result(OURS, {1: 1.0, 2: 1.0}),
        result(OURS_COMPILED, {1: 0.5, 2: 0.5}),
        result(Contender("ours", True, "zero2", processes=2), {1: 0.1, 2: 0.1}),
        result(LLAMA, {1: 1.2, 2: 1.2}),
        result(LLAMA_COMPILED, {1: 0.8, 2: 0.82}),
        result(Contender("litgpt", True, allocator="ours"), {1: 0.75, 2: 0.76}),
    )
    ends = closing(found)
    assert ends["as_users_run_it"]["ratio"] == pytest.approx(1.62)
    assert closing_line(found) == (
        "26m, ours / fastest peer: 1.62 (ours-compiled / transformers-compiled), "
        "same allocator 1.51 (litgpt-compiled+allocator)"
    )


def test_without_peers_the_closing_line_says_so():
    assert "n/a" in closing_line(report(result(OURS, {1: 1.0})))


def test_contenders_that_never_met_are_compared_by_way_of_the_baseline():
    # ours-compiled was measured while the machine was half as fast.
    found = report(
        result(OURS, {1: 1.0, 2: 2.0}), result(OURS_COMPILED, {2: 1.0}), result(LLAMA, {1: 1.0})
    )
    assert closing(found)["as_users_run_it"]["ratio"] == pytest.approx(2.0)


def test_the_table_has_every_contender_and_the_reason_of_every_missing_one():
    found = report(result(OURS, {1: 0.5}), result(LLAMA, {1: 1.0}), litgpt="not installed")
    lines = size_table(found).splitlines()
    header, ours, peer = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ")
    )
    ours, peer = dict(zip(header, ours, strict=True)), dict(zip(header, peer, strict=True))
    assert ours["tokens/s"].startswith("2,000 ")
    assert (ours["against ours-eager"], peer["against ours-eager"][:5]) == ("1", "0.500")
    teraflops = 2000 * SIZES["26m"].counts[1] / 1e12
    assert float(ours["TFLOP/s"]) == pytest.approx(teraflops, rel=1e-2)
    assert ours["of measured peak"] == f"{teraflops / 2:.1%}"  # the median of 1, 2 and 3
    assert (ours["memory, GiB"], ours["first step, s"]) == ("1.00", "2.5")
    assert "- litgpt: not installed" in lines
    assert json.loads(json.dumps(size_json(found)))["results"][1]["name"] == "transformers-eager"


def test_the_share_of_exchange_is_what_is_missing_to_processes_on_their_own():
    found = report(
        result(Contender("ours", True, "alone", processes=2), {1: 1.0, 2: 2.0}),
        result(Contender("ours", True, "zero2", processes=2), {1: 1.25, 2: 2.5}),
        result(Contender("ours", False, "ddp", processes=2), {1: 3.0, 2: 3.0}),  # nobody like it
        result(OURS_COMPILED, {1: 0.5, 2: 0.5}, tokens=500),
    )
    assert communication(found) == pytest.approx({"ours-zero2-compiled": 0.2})
    assert "exchange between processes takes: ours-zero2-compiled 20.0%." in size_table(found)
    assert "exchange" not in size_table(report(result(OURS, {1: 1.0})))


def test_different_numbers_of_threads_are_said():
    found = report(result(OURS, {1: 0.5}), result(LLAMA, {1: 1.0}))
    assert "NOT ALIKE" not in size_table(found)
    found.results[0].threads = 2
    assert "threads of ours-eager 2, transformers-eager 0" in size_table(found)


def test_mfu_is_the_share_of_the_data_sheet_where_that_is_known():
    found = report(
        result(OURS, {1: 0.5}), result(Contender("ours", False, "ddp", "default", 2), {1: 0.5})
    )
    found.sheet_peak, found.devices_shared = 4e12, False
    single, ddp = size_json(found)["results"]
    assert single["share_of_peak"] == pytest.approx(single["flops"] / 4e12)
    assert ddp["share_of_peak"] == pytest.approx(single["share_of_peak"] / 2)
    assert "| MFU |" in size_table(found)
