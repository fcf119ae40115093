"""Which interface others are told; on real networks in tests/integration/test_two_machines.py."""

import os
from types import SimpleNamespace

import pytest

from common.errors import UsageError
from training.engine import network
from training.engine.network import INTERFACE, listen_where_others_reach

INTERFACES = {
    name: [SimpleNamespace(address=address)]
    for name, address in {"lo": "127.0.0.1", "eth0": "10.0.0.2", "docker0": "172.17.0.1"}.items()
}


@pytest.fixture
def machine(monkeypatch):
    """The second of two machines: what its name means to it, and where routes lead."""

    def machine(own: str | None, routes: dict[str, str], **environ: str) -> None:
        place = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        place |= {"MASTER_ADDR": "node1"} | environ
        monkeypatch.setattr(os, "environ", place)
        monkeypatch.setattr(network.socket, "gethostname", lambda: "node2")
        monkeypatch.setattr(network.psutil, "net_if_addrs", lambda: INTERFACES)
        monkeypatch.setattr(network, "_address_of_own_name", {"node2": own}.get)
        monkeypatch.setattr(
            network, "_interface_towards", lambda host, interfaces: routes.get(host)
        )

    return machine


@pytest.mark.parametrize("own", ["127.0.1.1", "127.0.0.1", "::1", None])
def test_a_name_that_others_would_take_for_theirs_is_replaced_aloud(machine, own, capsys):
    machine(own, {"node1": "eth0"})
    listen_where_others_reach()
    assert os.environ[INTERFACE] == "eth0"
    assert capsys.readouterr().out == (
        f"node2 is {own or 'unknown'} to itself, where no other machine finds it: "
        "GLOO_SOCKET_IFNAME=eth0 instead\n"
    )


def test_other_processes_of_a_machine_do_the_same_in_silence(machine, capsys):
    machine("127.0.1.1", {"node1": "eth0"}, LOCAL_RANK="1")
    listen_where_others_reach()
    assert os.environ[INTERFACE] == "eth0"
    assert capsys.readouterr().out == ""


def test_the_machine_where_all_meet_takes_the_interface_of_its_default_route(machine):
    machine("127.0.1.1", {"192.0.2.1": "eth0"})
    listen_where_others_reach()
    assert os.environ[INTERFACE] == "eth0"


def test_where_no_route_leads_the_interface_has_to_be_named(machine):
    machine("127.0.1.1", {})
    with pytest.raises(UsageError, match=r"GLOO_SOCKET_IFNAME=NAME .* one of eth0, docker0$"):
        listen_where_others_reach()


@pytest.mark.parametrize(
    ("own", "environ"),
    [
        ("10.0.0.2", {}),
        ("127.0.1.1", {"LOCAL_WORLD_SIZE": "4"}),
        ("127.0.1.1", {INTERFACE: "docker0"}),
    ],
    ids=["others find it", "alone", "named by hand"],
)
def test_otherwise_nothing_is_changed(machine, own, environ, capsys):
    machine(own, {"node1": "eth0"}, **environ)
    before = dict(os.environ)
    listen_where_others_reach()
    assert os.environ == before
    assert capsys.readouterr().out == ""


def test_a_process_without_a_launcher_is_alone(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    listen_where_others_reach()
    assert os.environ == {}


@pytest.mark.parametrize("asked", ["eth9", "eth0,eth9"])
def test_an_interface_that_is_not_there_is_refused_by_name(machine, asked):
    machine("10.0.0.2", {}, **{INTERFACE: asked})
    with pytest.raises(UsageError, match=f"={asked}: node2 has no eth9, it has lo, eth0, docker0"):
        listen_where_others_reach()
