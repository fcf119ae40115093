"""Simulate two machines joined by a network cable. Each is a set of Linux namespaces with its own
network, host name, processes and mounts.

Tests need not clean up. The first process of a machine is `cat`. It reads from a pipe of the test
process, so it ends when the test process ends. The kernel then ends all processes of the machine.
"""

import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from conftest import REPOSITORY, clean_environment, tree_of

NAMES, ADDRESSES = ("nodea", "nodeb"), ("10.77.0.1", "10.77.0.2")
CABLE = "cable0"  # the interface at each end of the cable
NAMESPACES = ("--net", "--uts", "--mount", "--pid")


class Machine:
    """A simulated machine; the constructor starts it."""

    def __init__(self, name: str, address: str):
        self.name, self.address = name, address
        new = ("unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc")
        begin = 'hostname "$0" && ip link set lo up && echo up && exec cat'
        self._holder = subprocess.Popen(
            [*new, "sh", "-c", begin, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self._holder.stdout.readline() != "up\n":
            reason = self._holder.stderr.read().strip()
            pytest.skip(f"only root can make network namespaces here ({reason})")
        _, first = tree_of(self._holder.pid)
        self.number = first.pid  # pid of the machine's first process, seen from outside

    def inside(self, cwd: Path = REPOSITORY) -> tuple[str, ...]:
        """Return the words to put before a command so that it runs on this machine."""
        enter = ("nsenter", "--target", str(self.number), *NAMESPACES)
        return (*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(cwd))

    def do(self, *command: str) -> None:
        subprocess.run([*self.inside(), *command], check=True, capture_output=True)

    def hide(self, folder: Path) -> None:
        """Mount an empty disk over the folder, on this machine only."""
        self.do("mount", "-t", "tmpfs", "none", str(folder))

    def start(self, command: list[str], log: Path, **environ: str) -> subprocess.Popen:
        """Start a command; append its output to the file `log`."""
        with open(log, "a") as output:
            return subprocess.Popen(
                [*self.inside(), *command],
                env=clean_environment() | environ,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
            )

    def plug(self, how: str) -> None:
        """Set this machine's end of the cable "up" or "down"."""
        self.do("ip", "link", "set", CABLE, how)

    def stop(self) -> None:
        self._holder.stdin.close()
        self._holder.wait()


@contextmanager
def two_machines(folder: Path):
    """Start two machines joined by a cable; skip the test where that is not possible.

    On each machine, the other's name resolves to the other's address, and its own name resolves to
    127.0.1.1, as on Debian. The files for /etc/hosts are written to `folder`.
    """
    try:
        subprocess.run(["ip", "-V"], check=True, capture_output=True)
    except OSError:
        pytest.skip("no network namespaces without ip (apt-get install iproute2)")
    with ExitStack() as switched_on:
        machines = []
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            machines.append(Machine(name, address))
            switched_on.callback(machines[-1].stop)
        a, b = machines
        end, other_end = (("name", CABLE, "netns", str(machine.number)) for machine in machines)
        join = ["ip", "link", "add", *end, "type", "veth", "peer", *other_end]
        subprocess.run(join, check=True)
        for machine, other in ((a, b), (b, a)):
            machine.do("ip", "addr", "add", f"{machine.address}/24", "dev", CABLE)
            machine.plug("up")
            machine.do("ip", "route", "add", "default", "dev", CABLE)
            hosts = folder / f"hosts-{machine.name}"
            lines = ["127.0.0.1 localhost", f"127.0.1.1 {machine.name}"]
            hosts.write_text("\n".join([*lines, f"{other.address} {other.name}", ""]))
            machine.do("mount", "--bind", str(hosts), "/etc/hosts")
            # Remove the DNS servers: a machine cannot reach them, so each query would wait.
            no_dns = "test ! -e /etc/resolv.conf || mount --bind /dev/null /etc/resolv.conf"
            machine.do("sh", "-c", no_dns)
        yield a, b
