from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from lm.common import control_groups
from lm.common.numbers import available_cores
from lm.engine.hardware import available_memory

# A job's step in a group below the job's group, as SLURM makes it.
STEP_2 = {"proc/self/cgroup": "1:name=x:/y\n0::/slurm/job_7/step_0\n"}
# A container sees its own group as the root folder, but the path of this group on its host.
CONTAINER_1 = {"proc/self/cgroup": "9:memory:/docker/a1\n4:cpu,cpuacct:/docker/a1\n0::/\n"}


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Writes files of a system under tmp_path, which replaces the root of the file system."""

    def system(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    def path(first, *more) -> Path:
        return Path(tmp_path, str(first).removeprefix("/"), *more)

    monkeypatch.setattr(control_groups, "Path", path)
    return system


@pytest.mark.parametrize(
    ("groups", "quota", "cores"),
    [
        (STEP_2, {"slurm/job_7/cpu.max": "150000 100000\n"}, 1),  # the threads share 1.5 cores
        (STEP_2, {"slurm/job_7/step_0/cpu.max": "300000 100000\n", "cpu.max": "max 100000\n"}, 3),
        (STEP_2, {"slurm/job_7/step_0/cpu.max": "max 100000\n"}, 6),
        (CONTAINER_1, {"cpu/cpu.cfs_quota_us": "50000\n"}, 1),
        (CONTAINER_1, {"cpu/docker/a1/cpu.cfs_quota_us": "250000\n"}, 2),
        (CONTAINER_1, {"cpu/cpu.cfs_quota_us": "-1\n"}, 6),
        ({}, {}, 6),  # not Linux
    ],
)
def test_a_quota_of_this_process_or_of_a_group_above_limits_the_cores(
    system, monkeypatch, groups, quota, cores
):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(6), raising=False)
    files = {f"sys/fs/cgroup/{name}": text for name, text in quota.items()}
    periods = {name.replace("quota", "period"): "100000\n" for name in files if "cfs" in name}
    system(groups | files | periods)
    assert available_cores() == cores


@pytest.mark.parametrize(
    ("groups", "limit", "stat"),
    [
        (STEP_2, "slurm/job_7/memory.max", "file 9\nanon 1000000\n"),
        (CONTAINER_1, "memory/memory.limit_in_bytes", "rss 7\ntotal_rss 1000000\n"),
    ],
)
def test_every_control_group_above_the_process_can_limit_its_memory(
    system, monkeypatch, groups, limit, stat
):
    limit = Path("sys/fs/cgroup", limit)
    unlimited = limit.parent / ("step_0" if groups is STEP_2 else "docker/a1") / limit.name
    none = {unlimited: "max\n" if groups is STEP_2 else f"{2**63 - 4096}\n"}
    stats = {path.with_name("memory.stat"): stat for path in (limit, unlimited)}
    system(groups | {limit: "3000000\n"} | none | stats)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=9_000_000_000))
    used = SimpleNamespace(rss=500, shared=200)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: used))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert available_memory(torch.device("cpu"), 2) == 1_000_300
