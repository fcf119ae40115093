import pytest

from benchmarks.ours import check_extra, command_line
from benchmarks.work import SIZES
from common.errors import UsageError
from training.arguments import parse_arguments


def test_ours_is_asked_for_the_same_work():
    words = command_line(SIZES["104m"], False, "--no-use_flash_attn")
    args, settings = parse_arguments(words)
    assert (args.batch_size, args.grad_clip, args.dtype) == (8, 1.0, "bfloat16")
    assert not settings["use_flash_attn"]
    config = SIZES["104m"].config
    assert {name: getattr(config, name) for name in ("dim", "n_layers", "n_heads")} == {
        name: settings[name] for name in ("dim", "n_layers", "n_heads")
    }


FIXED = {
    "--dim 128": "dim",
    "--hidden_dim 64": "hidden_dim",
    "--max_seq_len 64": "max_seq_len",
    "--batch_size 1": "batch_size",
    "--accumulation_steps 2": "accumulation_steps",
    "--dtype float32": "dtype",
    "--grad_clip 0": "grad_clip",
    "--dropout 0.1": "dropout",
    "--no-tie_embeddings": "tie_embeddings",
    "--compile on": "compile",
    "--profile": "profile",
}


@pytest.mark.parametrize("extra", FIXED)
def test_what_would_make_ours_another_work_is_refused(extra):
    with pytest.raises(UsageError, match=f"--{FIXED[extra]} is the same for all contenders"):
        check_extra(SIZES["test"], extra)


@pytest.mark.parametrize(
    "extra", ["", "--optimizer muon --muon_momentum 0.9", "--no-use_flash_attn", "--batch_size 2"]
)
def test_what_changes_how_ours_does_the_work_is_allowed(extra):
    check_extra(SIZES["test"], extra)
