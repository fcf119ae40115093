"""Read the limits that Linux's control groups set, for example those of a container."""

import os
from contextlib import suppress
from itertools import product
from pathlib import Path

# Controller → the files of its limit, in version 2 and in version 1 of cgroup.
LIMITS = {
    "cpu": (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
    "memory": (("memory.max",), ("memory.limit_in_bytes",)),
}


def group_limits(controller: str) -> dict[Path, list[int]]:
    """Return the limits of this process's groups and of all groups above them: folder → numbers.
    The numbers of "cpu" are quota and period in microseconds, the number of "memory" is bytes."""
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:  # not Linux
        return {}
    # A line is "number:controllers:path". Version 2 has no controllers: its line is "0::path".
    paths = {name: x.split(":", 2)[2] for x in groups for name in x.split(":")[1].split(",")}
    found = {}
    for mount in mounts:
        place, _, system = mount.partition(" - ")  # see man 5 proc_pid_mountinfo
        (root, folder), (name, _, options) = place.split()[3:5], system.split(" ", 2)
        if name == "cgroup2" or (name == "cgroup" and controller in options.split(",")):
            path = paths.get("" if name == "cgroup2" else controller, root)
            group = Path(folder, os.path.relpath(path, root))  # a container sees a part of all
            for above, files in product((group, *group.parents), LIMITS[controller]):
                with suppress(OSError, ValueError):  # no such file here, or no limit: "max"
                    words = " ".join((above / file).read_text() for file in files).split()
                    numbers = [int(word) for word in words]
                    if numbers[0] > 0:  # -1: no limit
                        found[above] = numbers
    return found
