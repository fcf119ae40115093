"""Adapters in training: the same under every engine, and resumed to the bit. What a run with
adapters leaves is in test_sft.py."""

import pytest
from conftest import found_by

# test_sft.py goes on with adapters under ZeRO-2 and ZeRO-3.
pytestmark = [pytest.mark.slow, pytest.mark.variant]

ENGINES = ("ddp", "zero1", "zero2", "zero3")
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> dict:
    """What lora_engines.py has found out."""
    return found_by("lora_engines.py", tmp_path_factory.mktemp("lora_engines"), 2, ENGINES)


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_trains_adapters_as_ddp_does(name, engines):
    expected = engines["float32"]["ddp"]["losses"]
    assert engines["float32"][name]["losses"] == pytest.approx(expected, abs=TOLERANCE)
    assert expected[-1] < expected[0] - 0.01
    bf16 = engines["bfloat16"]
    assert bf16[name]["losses"] == pytest.approx(bf16["ddp"]["losses"], abs=0.02)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ENGINES)
def test_the_base_stays_as_it_was_and_checkpoints_have_adapters_alone(name, precision, engines):
    facts = engines[precision][name]
    assert facts["as the base"]
    assert facts["without gradient"]
    assert facts["frozen"] == [precision]
    assert len(facts["trained"]) == 2 * 7 * 2  # factors, layers, blocks
    assert all(name.endswith((".lora_a", ".lora_b")) for name in facts["trained"])
    assert len(facts["moments"]) == 2 * len(facts["trained"])


@pytest.mark.parametrize("name", ENGINES)
def test_samples_see_the_adapters(name, engines):
    assert engines["float32"][name]["whole"] < TOLERANCE
    assert engines["bfloat16"][name]["whole"] < 0.05


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ENGINES)
def test_a_run_goes_on_to_the_bit(name, precision, engines):
    facts = engines[precision][name]
    assert facts["goes on"] == {"losses": facts["losses"][2:], "difference": 0}


@pytest.mark.parametrize("before", ENGINES)
@pytest.mark.parametrize("after", ENGINES)
def test_a_checkpoint_of_adapters_goes_on_under_every_engine(before, after, engines):
    whole = engines["float32"][before]["losses"][2:]
    resumed = engines["resumed"][after][before]
    if before == after:
        assert resumed == {"losses": whole, "difference": 0}
    assert resumed["losses"] == pytest.approx(whole, abs=TOLERANCE)
    assert resumed["difference"] < 10 * TOLERANCE


def test_muon_steps_both_factors(engines):
    ddp, zero2 = engines["muon"]["ddp"], engines["muon"]["zero2"]
    # Newton and Schulz make much of the smallest singular values, rounding errors among them.
    assert zero2["losses"] == pytest.approx(ddp["losses"], abs=10 * TOLERANCE)
    assert ddp["losses"][-1] < ddp["losses"][0]
    for facts in (ddp, zero2):
        assert facts["goes on"] == {"losses": facts["losses"][2:], "difference": 0}
    assert len(ddp["moments"]) == 2 * 7 * 2
    assert all(name.endswith(".momentum_buffer") for name in ddp["moments"])
