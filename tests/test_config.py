import math

import pytest
from conftest import error_of

from model import ConfigError, LMConfig

SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING |= {"original_max_seq_len": 8192}
WRONG = {
    ("dim", "n_layers", "n_kv_heads", "vocab_size", "max_seq_len"): (0, -8, 8.0, "8", None, True),
    ("hidden_dim", "head_dim"): (0, -64, 64.0, "64", True),
    ("dropout", "norm_eps", "rope_theta"): ("0.5", None, [0.5]),
    ("tie_embeddings", "use_flash_attn"): ("false", 2, None),
}


@pytest.mark.parametrize("names", WRONG)
def test_wrong_types_and_sizes_below_1_are_refused_by_name(names):
    for name in names:
        for value in WRONG[names]:
            with pytest.raises(ConfigError, match=f"^{name} "):
                LMConfig.from_dict({name: value})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dim": 500, "n_heads": 8}, ["dim 500", "n_heads 8"]),
        ({"n_heads": 8, "n_kv_heads": 3}, ["n_heads 8", "n_kv_heads 3"]),
        ({"dropout": 1.0}, ["dropout", "1.0"]),
        ({"dropout": -0.1}, ["dropout", "-0.1"]),
        ({"dropout": math.nan}, ["dropout", "nan"]),
        ({"norm_eps": 0.0}, ["norm_eps", "0.0"]),
        ({"norm_eps": math.nan}, ["norm_eps", "nan"]),
        ({"rope_theta": -1.0}, ["rope_theta", "-1.0"]),
        ({"rope_theta": math.inf}, ["rope_theta", "inf"]),
        ({"head_dim": 7}, ["head_dim 7", "change dim, n_heads or head_dim"]),
        ({"rope_scaling": SCALING | {"factor": 0}}, ["rope_scaling", "factor", "0"]),
        ({"rope_scaling": SCALING | {"factor": "8"}}, ["rope_scaling", "factor", "'8'"]),
        ({"norm_eps": 10**400}, ["norm_eps"]),
        ({"max_seq_len": 10**11}, ["max_seq_len", "at most"]),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings, named):
    line = error_of(LMConfig, error=ConfigError, **settings)
    assert all(word in line for word in named)


@pytest.mark.parametrize(
    ("dim", "multiple_of", "hidden_dim"),
    [(512, 64, 1408), (768, 64, 2048), (4096, 256, 11008), (96, 1, 256), (32, 64, 128)],
)
def test_hidden_dim_follows_from_dim_as_in_llama(dim, multiple_of, hidden_dim):
    assert LMConfig(dim=dim, multiple_of=multiple_of).hidden_dim == hidden_dim


def test_a_config_without_head_dim_and_rope_scaling_gets_their_defaults():
    old = LMConfig().to_dict()
    assert not old.keys() & {"qk_norm", "use_moe"}  # stored only if they are on
    del old["head_dim"], old["rope_scaling"]
    assert LMConfig.from_dict(old).shape() == LMConfig().shape()


def test_unknown_settings_are_refused_by_name():
    unknown = {"dim": 64, "n_shared": 1, "n_experts": 4}
    assert "n_experts, n_shared" in error_of(LMConfig.from_dict, unknown, error=ConfigError)
