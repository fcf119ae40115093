"""What ZeRO-3 needs before training; the model that it builds: integration/test_engines.py."""

from types import SimpleNamespace

import pytest
import torch

from common.errors import UsageError
from model import LMConfig, Transformer
from runs.lock import release_locks
from training.engine.kinds import NVME, Kind
from training.engine.zero_3 import claim_folders, divided_as_built, require_buffers


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


def on_nvme(**numbers: int) -> Kind:
    return Kind("", 3, parameters_on=NVME, **{"reuse_distance": 0} | numbers)


@pytest.fixture(scope="module")
def shapes() -> Transformer:
    """4 layers with 7 matrices each, and a larger matrix, which is tied."""
    shape = {"dim": 1024, "n_layers": 4, "n_heads": 16, "n_kv_heads": 16, "hidden_dim": 1664}
    with torch.device("meta"):
        return Transformer(LMConfig(**shape, vocab_size=9000))


def test_weights_that_are_not_let_go_of_need_a_buffer_each(shapes):
    with pytest.raises(UsageError, match=r'write "stage3_.*": 0, or "buffer_count": 29$'):
        require_buffers(on_nvme(reuse_distance=10**9, parameter_buffers=28), shapes, 2, 4)
    require_buffers(on_nvme(reuse_distance=10**9, parameter_buffers=29), shapes, 2, 4)
    require_buffers(on_nvme(), shapes, 2, 4)
    require_buffers(Kind("", 3, parameter_buffers=0), shapes, 2, 4)  # they are elsewhere
    small = on_nvme(reuse_distance=1, parameter_buffers=0)
    require_buffers(small, shapes, 64, 2)  # shares that stay in RAM


def test_a_weight_larger_than_a_buffer_is_refused_with_the_size_it_takes(shapes):
    largest = 1024 * 9000 // 4
    require_buffers(on_nvme(parameter_buffer=largest), shapes, 4, 2)
    with pytest.raises(UsageError, match=f'more than its "buffer_size" of .*: make it {largest}$'):
        require_buffers(on_nvme(parameter_buffer=largest - 1), shapes, 4, 2)
