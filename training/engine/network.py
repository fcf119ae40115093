"""Several machines: the network interface at which the others find this one."""

import os
import socket
from contextlib import suppress
from ipaddress import ip_address

import psutil

from common.errors import UsageError

INTERFACE = "GLOO_SOCKET_IFNAME"
FAR_AWAY = "192.0.2.1"  # nobody's (RFC 5737), so where the default route leads; nothing is sent


def listen_where_others_reach() -> None:
    """Name the interface to gloo, and say so, where it would take the loopback one.

    Gloo listens at the address of the machine's own name. Debian and Ubuntu give that as 127.0.1.1,
    many containers not at all: other machines would then look for this one on themselves.

    Raises UsageError: GLOO_SOCKET_IFNAME names an interface that is not there, or has to be named
    by hand.
    """
    environ = os.environ
    processes = environ.get("WORLD_SIZE", "1")
    if environ.get("LOCAL_WORLD_SIZE", processes) == processes:
        return
    here = socket.gethostname()
    interfaces = psutil.net_if_addrs()
    if asked := environ.get(INTERFACE):
        if missing := {*asked.split(",")} - interfaces.keys():
            raise UsageError(
                f"{INTERFACE}={asked}: {here} has no {', '.join(sorted(missing))}, it has "
                f"{', '.join(interfaces)}"
            )
        return
    own = _address_of_own_name(here)
    if own is not None and not _is_loopback(own):
        return
    known = f"{here} is {own or 'unknown'} to itself, where no other machine finds it"
    for host in (environ["MASTER_ADDR"], FAR_AWAY):
        if found := _interface_towards(host, interfaces):
            environ[INTERFACE] = found
            if environ["LOCAL_RANK"] == "0":
                print(f"{known}: {INTERFACE}={found} instead", flush=True)
            return
    others = ", ".join(name for name in interfaces if name != "lo") or "none: it has no network"
    raise UsageError(
        f"{known}: export {INTERFACE}=NAME of the interface that leads to the others, one of "
        f"{others}"
    )


def _address_of_own_name(name: str) -> str | None:
    """The one that gloo takes: the first to which a socket can be bound; None without any."""
    with suppress(OSError):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        for family, kind, _, _, address in found:
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return address[0]
    return None


def _interface_towards(host: str, interfaces: dict[str, list]) -> str | None:
    """The interface that leads to `host`; None if nothing or the loopback one does."""
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # looks for a route and sends nothing
            own = probe.getsockname()[0]
        for name, addresses in interfaces.items():
            if not _is_loopback(own) and own in {known.address for known in addresses}:
                return name
    return None


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback
