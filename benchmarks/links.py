"""Simulate machines on this one: network namespaces, joined by links whose rate `tc` can limit."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from lm.common.errors import UsageError

DEVICE = "eth0"  # the link of a simulated machine


@contextmanager
def simulated_machines(count: int) -> Iterator[list[tuple[list[str], str]]]:
    """Yield (words to put before a command, address) of each machine. A bridge in a namespace of
    its own joins them. Needs root and the programs ip and tc; raises UsageError without."""
    hub = f"hub{os.getpid()}"
    names = [f"{hub}-{i}" for i in range(count)]
    with ExitStack() as cleanup:
        for name in (hub, *names):
            do("ip", "netns", "add", name)
            cleanup.callback(do, "ip", "netns", "delete", name)  # deletes its devices too
        do("ip", "-n", hub, "link", "add", "bridge0", "type", "bridge")
        do("ip", "-n", hub, "link", "set", "bridge0", "up")
        machines = []
        for i, name in enumerate(names):
            port, address = f"port{i}", f"10.78.0.{i + 1}"
            end = ["name", DEVICE, "netns", name, "type", "veth"]
            do("ip", "link", "add", *end, "peer", "name", port, "netns", hub)
            do("ip", "-n", hub, "link", "set", port, "master", "bridge0", "up")
            do("ip", "-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                do("ip", "-n", name, "link", "set", device, "up")
            machines.append((["ip", "netns", "exec", name], address))
        yield machines


def limit_rate(bytes_per_second: float) -> None:
    """Limit what this process's machine sends. Packets wait up to a second instead of being lost.
    A burst of 5 ms may pass at once, because the kernel's clock ticks every 4 ms."""
    burst = max(2**17, int(bytes_per_second / 200))
    limit = ["tbf", "rate", f"{int(8 * bytes_per_second)}bit", "burst", str(burst)]
    do("tc", "qdisc", "replace", "dev", DEVICE, "root", *limit, "latency", "1s")


def do(*command: str) -> None:
    """Run a command that needs root. Raises UsageError if the command fails or is missing."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip()
        raise UsageError(
            f"machines cannot be simulated here (needs root, ip and tc): {why}"
        ) from error
