"""What is said before a model is asked; test_serve_launch.py has the rest."""

import asyncio
import importlib.util
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from data.tokenizer import Tokenizer
from inference.continuation import Continuation
from inference.sampling import Sampling
from inference.server.app import Served, make_app, whole
from inference.server.replies import Reply
from scripts.serve import LOCAL, main


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["auto", "--port", "70000"], "--host 127.0.0.1 --port 70000: "),
        (["auto", "--host", "not.an.address.invalid"], "--host not.an.address.invalid --port 8000"),
        (["auto", "--top_p", "0"], "--top_p must be above 0 and at most 1, not 0.0"),
        (["auto", "--batch_size", "0"], "--batch_size must be at least 1, not 0"),
    ],
)
def test_a_mistake_is_one_line(capsys, flags, error):
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"serve: error: {error}")
    assert said.count("\n") == 1


def test_packages_that_are_missing_are_named(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["auto"])
    assert ended.value.code == 2
    told = "serve: error: serving takes fastapi uvicorn: python -m pip install fastapi uvicorn\n"
    assert capsys.readouterr().err == told


def app(name: str, hosts: tuple[str, ...] = ()):
    settings = {"worker": None, "tokenizer": None, "context": 8, "sampling": Sampling()}
    return make_app(Served(**settings, name=name, max_bytes=9, hosts=hosts))


def test_a_model_may_be_called_as_on_the_hub():
    answer = TestClient(app("HuggingFaceTB/SmolLM2")).get("/v1/models/HuggingFaceTB/SmolLM2")
    assert (answer.status_code, answer.json()["id"]) == (200, "HuggingFaceTB/SmolLM2")


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        *(("127.0.0.1:8000", 200), ("localhost", 200), ("LocalHost:1", 200), ("[::1]:80", 200)),
        *(("evil.example:8000", 403), ("localhost.evil.example", 403), ("", 403), ("[::1", 403)),
    ],
)
def test_who_listens_on_this_machine_alone_has_no_other_name(asked, status):
    for path in ("/", "/v1/models"):
        answer = TestClient(app("mine", LOCAL)).get(path, headers={"Host": asked})
        assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["message"].startswith("this server is not called '")
    assert TestClient(app("mine")).get("/", headers={"Host": asked}).status_code == 200


def test_a_client_that_leaves_before_its_turn_gives_its_text_up(packed):
    async def receive() -> dict:
        return {"type": "http.disconnect"}

    tokenizer = Tokenizer(packed / "tokenizer.model")
    text = Continuation(tokenizer, [5], Sampling(), 8, deliver=lambda *_: None)
    request = SimpleNamespace(receive=receive)
    answer = asyncio.run(whole(asyncio.Queue(), text, Reply(True, "mine"), request))
    assert (answer.status_code, text.finish_reason) == (499, "cancelled")
