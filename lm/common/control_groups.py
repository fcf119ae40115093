"""Read the limits that Linux's control groups set, for example those of a container."""

from contextlib import suppress
from pathlib import Path


def group_limits(controller: str, v2: list[str], v1: list[str]) -> dict[Path, list[int]]:
    """Return the limits of this process's groups and of all groups above them: folder → numbers.
    `v2` and `v1` are the files that hold the numbers in version 2 and in version 1 of cgroup."""
    found, lines = {}, []
    with suppress(OSError):  # not Linux
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    for _, names, path in (line.split(":", 2) for line in lines):
        if names and controller not in names.split(","):  # version 2 has no names
            continue
        # A container may see the path of its host here, but its own group as the root folder.
        group = Path("/sys/fs/cgroup", controller if names else "", path.lstrip("/"))
        for above in (group, *group.parents):
            with suppress(OSError, ValueError):  # no such file here, or no limit: "max"
                files = v1 if names else v2
                words = " ".join((above / file).read_text() for file in files).split()
                if int(words[0]) > 0:  # -1: no limit
                    found[above] = [int(word) for word in words]
    return found
