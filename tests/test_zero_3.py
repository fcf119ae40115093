"""What ZeRO-3 needs before training; the model that it builds: integration/test_engines.py."""

from types import SimpleNamespace

import pytest

from common.errors import UsageError
from runs.lock import release_locks
from training.engine.zero_3 import claim_folders, divided_as_built


@pytest.fixture
def engine_on():
    """Makes an engine whose optimizer is in a folder on NVMe."""

    def make(folder) -> SimpleNamespace:
        nvme = {"device": "nvme", "nvme_path": str(folder)}
        return SimpleNamespace(
            divides_model=True,
            deepspeed={"zero_optimization": {"stage": 3, "offload_optimizer": nvme}},
            cpu_group=None,
            accelerator=SimpleNamespace(is_local_main_process=True),
        )

    yield make
    release_locks()


def test_two_runs_do_not_share_a_folder_on_nvme(engine_on, tmp_path):
    claim_folders(engine_on(tmp_path / "new" / "one"))
    claim_folders(engine_on(tmp_path / "two"))
    with pytest.raises(UsageError, match=r'one is in use by .* take another "nvme_path"'):
        claim_folders(engine_on(tmp_path / "new" / "one"))


def test_a_folder_that_cannot_be_made_is_named(engine_on, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file, for NVMe, cannot be used"):
        claim_folders(engine_on(tmp_path / "file"))


def test_other_engines_build_a_model_as_it_is():
    with divided_as_built(SimpleNamespace(divides_model=False)) as nothing:
        assert nothing is None
