import json

import pytest
import torch

from benchmarks.generation import llama_of, main, untrained

SMALL = ("--sizes", "3m", "--prompt_tokens", "5", "--new_tokens", "6", "--rounds", "1")


def test_a_table_with_both_on_the_same_weights(capsys, tmp_path):
    flags = ("--dtypes", "float32", "--batch_sizes", "1,3", "--device", "cpu")
    main([*SMALL, *flags, "--json", str(tmp_path / "t.json")])
    out = capsys.readouterr().out
    cases = json.loads((tmp_path / "t.json").read_text())["cases"]
    assert [case["batch_size"] for case in cases] == [1, 3]
    for case in cases:
        assert case["same_tokens"] is True
        assert case["ratio"] == pytest.approx(case["ours"] / case["transformers"], rel=0.01)
        assert f"| 3m | float32 | {case['batch_size']} | {case['ours']:,.0f} |" in out


def test_the_peer_computes_the_same_logits():
    model = untrained("3m", context=20)
    tokens = torch.randint(model.config.vocab_size, (2, 20))
    with torch.no_grad():
        ours, theirs = model(tokens).logits, llama_of(model, "float32")(tokens).logits
    assert ours.abs().max() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--sizes", "7b"), "--sizes must be of 3m, 26m, 104m, not '7b'"),
        (("--dtypes", ""), "--dtypes must be of"),
        (("--batch_sizes", "many"), "--batch_sizes must be numbers"),
        (("--rounds", "0"), "must be at least 1"),
        (("--json", "/no/such/folder/t.json"), "there is no such folder"),
        (("--run", "/no/such/run"), "no such folder"),
    ],
    ids=str,
)
def test_what_cannot_work_is_one_line(capsys, flags, message):
    with pytest.raises(SystemExit, match="2"):
        main([*flags])
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
