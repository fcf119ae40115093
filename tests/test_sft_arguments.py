import os

import pytest

from common.errors import UsageError
from data.prepared import conversations_out
from training.setup import with_data
from training.sft_arguments import SFTArguments


def test_flags_for_preparing_are_taken_apart_as_a_shell_would():
    args = SFTArguments(prepare_flags="--data_split 2,4,4 --val_fraction '0.1'")
    assert args.prepare_words() == ["--data_split", "2,4,4", "--val_fraction", "0.1"]
    with pytest.raises(UsageError, match=r"^--prepare_flags .*: No closing quotation$"):
        SFTArguments(prepare_flags="--out 'my").prepare_words()


@pytest.mark.parametrize("flag", ["--out x", "--out=x", "--tokenizer x", "--conversations x"])
def test_flags_of_preparing_that_are_given_anyway_are_refused(flag):
    with pytest.raises(UsageError, match=r"^--prepare_flags --\w+: leave it out, "):
        SFTArguments(prepare_flags=f"--skip_bad_lines {flag}").prepare_words()


@pytest.mark.parametrize("flags", [{"conversations": "my.jsonl"}, {"prepare_flags": "--reuse"}])
def test_prepared_data_and_how_to_prepare_it_contradict_each_other(flags):
    with pytest.raises(UsageError, match=r"^--data is a folder .*: give either$"):
        with_data(SFTArguments(data="out/data/chat", **flags), None)


def test_prepared_data_is_used_as_it_is():
    args = SFTArguments(data="out/data/chat")
    assert with_data(args, None) is args


def test_files_of_one_name_are_prepared_in_folders_of_their_own(packed, tmp_path):
    one, other = (tmp_path / name / "train.jsonl" for name in "ab")
    places = [os.path.relpath(one), str(one), str(other)]
    out = [conversations_out(place, packed / "tokenizer.model") for place in places]
    assert out[0] == out[1] != out[2]
