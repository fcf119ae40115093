"""--sample_interval changes no bit of training, and a resumed run logs each sample once."""

import pytest
from conftest import Trained, train

pytestmark = pytest.mark.slow

FLAGS = (
    "--max_steps 6 --dropout 0.1 --batch_size 4 --accumulation_steps 2 --dtype bfloat16 "
    "--eval_interval 3 --eval_samples 16"
)
SAMPLES = " --sample_interval 2 --sample_prompt sum --log_with tensorboard"


@pytest.fixture(scope="module")
def resumed(packed, tmp_path_factory) -> Trained:
    """A run that reached step 6, lost its last checkpoint and was resumed from step 4."""
    path = tmp_path_factory.mktemp("resumed") / "run"
    flags = FLAGS + SAMPLES + " --save_interval 4 --profile --profile_interval 3"
    first = train("plain", 1, packed, path, flags)
    checkpoint = first.checkpoint(6)
    checkpoint.rename(checkpoint.with_name("lost"))
    return train("plain", 1, packed, path, flags + " --resume auto")


def test_writing_samples_changes_no_bit_of_training(packed, resumed, tmp_path):
    without = train("plain", 1, packed, tmp_path / "run", FLAGS)
    assert without.column("loss") == resumed.column("loss")
    assert resumed.ends_as(without, ("weights", "optimizer"))
    assert not (without.path / "samples.jsonl").exists()


def test_a_resumed_run_logs_each_sample_and_each_loss_once(resumed):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert "starts from: step-00000004" in resumed.out
    assert [row["step"] for row in resumed.samples()] == [2, 4, 6]
    events = EventAccumulator(str(resumed.path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    wanted = {f"train/{name}" for name in ("loss", "learning_rate", "grad_norm", "memory_gib")}
    wanted |= {"train/tokens", "train/tokens_per_second", "val/loss", "val/bits_per_byte"}
    wanted |= {f"profile/{phase}_seconds" for phase in ("data", "forward", "backward", "optimizer")}
    assert wanted <= set(events.Tags()["scalars"])
    losses = events.Scalars("train/loss")
    assert [each.step for each in losses] == resumed.column("step") == [1, 2, 3, 4, 5, 6]
    assert [each.value for each in losses] == pytest.approx(resumed.column("loss"), rel=1e-6)


def test_a_finished_run_leaves_its_report_and_says_what_to_try_next(resumed):
    page = (resumed.path / "report.html").read_text(encoding="utf-8")
    assert ">finished</td>" in page
    assert f"report:     {resumed.path / 'report.html'}" in resumed.out
    for script in ("generate", "evaluate", "export_hf"):
        assert f"python -m scripts.{script} {resumed.path}" in resumed.out
