import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.portable import CONFIG_FILE, WEIGHTS_FILE, load_portable, load_weights, save_portable
from model import ConfigError, LMConfig, Transformer

TOKENS = torch.arange(1, 9)[None]


def transformer(**changes) -> Transformer:
    torch.manual_seed(0)
    shape = {"dim": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 20, "max_seq_len": 8}
    return Transformer(LMConfig(**shape | changes)).eval()


def weights_of(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture
def saved(tmp_path):
    model = transformer()
    save_portable(tmp_path / "weights", model.config, weights_of(model))
    return tmp_path / "weights"


@pytest.mark.parametrize("tie_embeddings", [True, False], ids=["tied", "untied"])
def test_a_saved_model_comes_back_with_equal_logits(tmp_path, tie_embeddings):
    model = transformer(tie_embeddings=tie_embeddings, dropout=0.3)
    save_portable(tmp_path / "not" / "yet", model.config, weights_of(model))
    loaded = load_portable(tmp_path / "not" / "yet")
    assert loaded.config == model.config
    assert not loaded.training
    assert (loaded.output.weight is loaded.tok_embeddings.weight) == tie_embeddings
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


def test_a_tied_matrix_is_stored_once(saved):
    stored = load_file(saved / WEIGHTS_FILE)
    assert "tok_embeddings.weight" in stored
    assert "output.weight" not in stored
    assert sum(tensor.numel() for tensor in stored.values()) == transformer().num_parameters()


def test_matrices_that_are_not_contiguous_are_saved_with_their_values(tmp_path):
    model = transformer()
    weights = {name: w.t().contiguous().t() for name, w in weights_of(model).items()}
    save_portable(tmp_path, model.config, weights)
    assert torch.equal(load_portable(tmp_path)(TOKENS).logits, model(TOKENS).logits)


def test_half_precision_weights_are_loaded_into_fp32(tmp_path):
    model = transformer()
    halves = {name: weight.bfloat16() for name, weight in weights_of(model).items()}
    save_portable(tmp_path, model.config, halves)
    loaded = weights_of(load_portable(tmp_path))
    assert {weight.dtype for weight in loaded.values()} == {torch.float32}
    assert all(torch.equal(loaded[name], halves[name].float()) for name in halves)


def test_a_checkpoint_with_the_output_matrix_fits_a_tied_model():
    source, model = transformer(tie_embeddings=False), transformer()
    source.output.weight.data = source.tok_embeddings.weight.data.clone()
    load_weights(model, source.state_dict(), "llama")
    assert torch.equal(model(TOKENS).logits, source(TOKENS).logits)


def test_a_missing_weight_is_named():
    weights = weights_of(transformer())
    del weights["layers.1.attention.wk.weight"]
    with pytest.raises(ConfigError, match=r"^here: layers\.1\.attention\.wk\.weight is missing"):
        load_weights(transformer(), weights, "here")


def test_an_output_matrix_that_an_untied_model_lacks_is_named():
    with pytest.raises(ConfigError, match=r"output\.weight is missing"):
        load_weights(transformer(tie_embeddings=False), weights_of(transformer()), "here")


def test_a_weight_that_the_model_does_not_have_is_named():
    weights = weights_of(transformer(n_layers=3))
    with pytest.raises(ConfigError, match=r"^here: layers\.2\..* is not in this model"):
        load_weights(transformer(), weights, "here")


def test_a_weight_of_another_shape_is_named_with_both_shapes():
    weights = weights_of(transformer(vocab_size=30))
    expected = r"^here: tok_embeddings\.weight is \(30, 16\), the model has \(20, 16\)"
    with pytest.raises(ConfigError, match=expected):
        load_weights(transformer(), weights, "here")


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "7", '"dim"', '["dim"]', "[[1]]", '{"dim": 0}', '{"dim": "16"}'),
        *('{"experts": 4}', '{"dropout": null}', '{"dropout": "0.1"}', '{"norm_eps": [1]}'),
        pytest.param("[" * 100_000, id="deep nesting"),
    ],
)
def test_a_config_file_that_makes_no_sense_is_an_error_with_its_folder(saved, text):
    (saved / CONFIG_FILE).write_text(text)
    with pytest.raises(ConfigError, match=str(saved)):
        load_portable(saved)


def test_a_config_file_that_is_not_utf8_is_an_error_with_its_folder(saved):
    (saved / CONFIG_FILE).write_bytes(b'{"dim": "\xff"}')
    with pytest.raises(ConfigError, match=str(saved)):
        load_portable(saved)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_missing_file_is_an_error_that_names_it(saved, name):
    (saved / name).unlink()
    with pytest.raises(ConfigError, match=name):
        load_portable(saved)


def test_weights_of_another_config_are_refused(saved):
    other = transformer(dim=32)
    save_file(weights_of(other), saved / WEIGHTS_FILE)
    with pytest.raises(ConfigError, match=r"\(.*32.*\), the model has \(.*16.*\)"):
        load_portable(saved)


def test_others_may_read_the_weights_as_they_may_any_new_file(saved):
    assert (saved / WEIGHTS_FILE).stat().st_mode == (saved / CONFIG_FILE).stat().st_mode


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(saved, value):
    weights = weights_of(transformer())
    weights["norm.weight"] = torch.full_like(weights["norm.weight"], value)
    save_file(weights, saved / WEIGHTS_FILE)
    with pytest.raises(ConfigError, match=r"norm.weight holds NaN, infinity"):
        load_portable(saved)


def test_whole_numbers_are_no_weights(saved):
    weights = {name: weight.to(torch.int8) for name, weight in weights_of(transformer()).items()}
    save_file(weights, saved / WEIGHTS_FILE)
    with pytest.raises(ConfigError, match="no floating point numbers"):
        load_portable(saved)


def test_sizes_that_no_memory_holds_are_compared_before_they_are_built(saved):
    config = json.loads((saved / CONFIG_FILE).read_text())
    (saved / CONFIG_FILE).write_text(json.dumps(config | {"dim": 1 << 24, "n_heads": 1 << 20}))
    with pytest.raises(ConfigError, match=r"is \(.*\), the model has \("):
        load_portable(saved)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_weights_file_is_refused(saved, share):
    data = (saved / WEIGHTS_FILE).read_bytes()
    (saved / WEIGHTS_FILE).write_bytes(data[: int(share * len(data))])
    with pytest.raises(ConfigError, match=str(saved)):
        load_portable(saved)


def test_a_bit_flipped_in_the_weights_header_is_refused_or_harmless(saved):
    data = (saved / WEIGHTS_FILE).read_bytes()
    header_bits = 8 * (8 + int.from_bytes(data[:8], "little"))
    expected = load_portable(saved)(TOKENS).logits
    errors = []
    for bit in random.Random(0).sample(range(header_bits), 300):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (saved / WEIGHTS_FILE).write_bytes(flipped)
        try:
            logits = load_portable(saved)(TOKENS).logits
        except ConfigError as error:
            errors.append(str(error))
        else:  # the header's free text
            assert torch.equal(logits, expected), f"bit {bit} changed the model"
    assert len(errors) > 200
    assert [error for error in errors if str(saved) not in error] == []


def test_config_file_reads_as_the_settings(saved):
    assert json.loads((saved / CONFIG_FILE).read_text()) == transformer().config.to_dict()
