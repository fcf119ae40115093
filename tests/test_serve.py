"""The server answers the openai package and plain HTTP, and refuses wrong requests."""

import http.client
import json
import logging
import socket
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from conftest import SAFETY_NET_SECONDS, error_of, wait_for
from live_server import LiveServer
from starlette.testclient import TestClient

from lm.data.chat_template import encode_chat_prompt
from lm.data.conversations import Turn
from lm.inference.sampling import Sampling
from lm.inference.server.app import Served, bind, make_app, once_per_kind
from lm.inference.server.requests import ChatRequest
from scripts.serve import LOCAL

CONTEXT = 1 << 16  # tokens: no answer fills it
LONG_TEXT = "1 + 1 = 2; " * 20_000  # fills it
HELLO = [{"role": "user", "content": "1 + 1"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server(packed):
    started = LiveServer("mine", packed / "tokenizer.model", CONTEXT)
    yield started
    started.close()


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


OPENAI_FIELDS = {"temperature": 1.8, "top_p": 0.9, "seed": 11}
VLLM_FIELDS = {"top_k": 0, "min_p": 0.01, "repetition_penalty": 1.2}
REQUEST = {"model": "mine", "messages": HELLO, "extra_body": VLLM_FIELDS, **OPENAI_FIELDS}


@pytest.fixture(scope="module")
def expected(server) -> str:
    return server.continues(server.prompt_ids("1 + 1"), 20, **OPENAI_FIELDS, **VLLM_FIELDS)


def test_a_chat_answer_is_the_continuation_of_the_template(client, server, expected):
    idle = {"n": 1, "logprobs": False, "presence_penalty": 0.0, "stop": None, "user": "me"}
    idle |= {"response_format": {"type": "text"}, "modalities": ["text"], "verbosity": "medium"}
    idle |= {"reasoning_effort": "none", "prediction": {"type": "content", "content": "2"}}
    answer = client.chat.completions.create(**REQUEST, max_tokens=20, tools=[], **idle)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected)
    assert choice.finish_reason == "length"
    usage, n = answer.usage, len(server.prompt_ids("1 + 1"))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (n, 20, n + 20)
    assert answer.model == "mine"
    free = REQUEST | {"seed": None, "max_tokens": 20}
    drawn = {client.chat.completions.create(**free).choices[0].message.content for _ in range(4)}
    assert len(drawn) > 1  # each time another seed


def test_messages_of_all_roles_in_parts_and_empty_answers_are_turns(tokenizer):
    parts = [{"type": "text", "text": "1 +"}, {"type": "text", "text": " 1"}]
    said = [{"role": "developer", "content": "Be brief."}, *HELLO]
    said += [{"role": "assistant", "content": "", "refusal": None}]
    said += [{"role": "user", "content": parts}]
    turns = [Turn("system", "Be brief."), Turn("user", "1 + 1"), Turn("assistant", "")]
    prompt = encode_chat_prompt(tokenizer, [*turns, Turn("user", "1 + 1")])
    assert ChatRequest.model_validate({"messages": said}).encode(tokenizer) == (prompt, [])


def test_a_streamed_answer_is_the_same_text_in_pieces(client, expected):
    streamed = {"max_completion_tokens": 20, "stream": True}
    usage = {"include_usage": True}
    *texts, last = client.chat.completions.create(**REQUEST, **streamed, stream_options=usage)
    pieces = [chunk.choices[0].delta.content or "" for chunk in texts]
    assert "".join(pieces) == expected
    assert sum(map(bool, pieces)) > 5
    assert texts[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in texts]
    assert reasons == [None] * (len(texts) - 1) + ["length"]
    assert (last.choices, last.usage.completion_tokens) == ([], 20)


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_is_completed_up_to_a_stop_string(client, server, stream):
    ids, next_ids = server.tokenizer.encode_prompt("sum 1: ")
    whole = server.continues(ids, 20, next_ids).removeprefix(" ")  # the prompt ends with this space
    stop = whole[6:9]
    request = {"model": "mine", "prompt": ["sum 1: "], "temperature": 0, "max_tokens": 30}
    answer = client.completions.create(**request, stop=[stop, "not there"], stream=stream)
    choices = [chunk.choices[0] for chunk in (answer if stream else [answer])]
    assert "".join(choice.text for choice in choices) == whole.partition(stop)[0]
    assert choices[-1].finish_reason == "stop"


def test_a_failure_that_repeats_is_logged_once(caplog):
    logger = logging.getLogger("of this test")
    logger.addFilter(once_per_kind())
    for _ in range(300):
        for error in (OSError(24, "Too many open files"), KeyError("a"), TypeError("b")):
            logger.error("accept failed\nsocket: %d", 3, exc_info=error)
        logger.warning("Exceeded concurrency limit.")
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["accept failed\nsocket: 3"] * 3 + ["Exceeded concurrency limit."]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_cancels_its_answer(server, stream):
    leaving = http.client.HTTPConnection(*server.address)
    body = json.dumps({"messages": HELLO, "stream": stream})
    leaving.request("POST", CHAT, body, {"Content-Type": "application/json"})
    wait_for(lambda: server.n_running == 1)
    (text,) = (each for each in server.worker._running if not each.finish_reason)
    leaving.close()
    wait_for(lambda: text.finish_reason)
    assert text.finish_reason == "cancelled"


def post(server: LiveServer, path: str, body, **headers: str) -> tuple[int, dict]:
    """Send a plain HTTP request; return the status and the JSON of the answer."""
    connection = http.client.HTTPConnection(*server.address)
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    connection.request("POST", path, body, {"Content-Type": "application/json"} | headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_at_shutdown_all_waiting_clients_get_the_reason(packed, capsys):
    server = LiveServer("mine", packed / "tokenizer.model", CONTEXT)
    state = server.server.server_state
    leaving = http.client.HTTPConnection(*server.address)
    incomplete = {"Content-Type": "application/json", "Content-Length": "99"}
    leaving.request("POST", COMPLETIONS, b"{", incomplete)
    wait_for(lambda: state.tasks)
    leaving.close()
    wait_for(lambda: not state.connections and not state.tasks)  # this prints nothing
    with ThreadPoolExecutor() as clients:
        request = server, COMPLETIONS, {"prompt": "1", "temperature": 0}
        waiting = [clients.submit(post, *request) for _ in range(2)]
        wait_for(lambda: server.n_running == 2)
        server.server.should_exit = True
    for status, answer in (client.result() for client in waiting):
        assert (status, answer["error"]["message"]) == (503, "the server is shutting down")
    server.thread.join(SAFETY_NET_SECONDS)
    assert not server.thread.is_alive()
    assert capsys.readouterr().err == ""


TURN = {"role": "user", "content": "1"}
ANSWER = {"role": "assistant", "content": "2"}
PICTURE = {"role": "user", "content": [{"type": "image_url"}]}
BROKEN = {"role": "user", "content": "\ud800"}  # half a character
REFUSED = [  # path, body, status, the wrong parameter, words of the message
    (CHAT, {"messages": []}, 400, "messages", "at least 1"),
    (CHAT, {"messages": [TURN | {"role": "robot"}]}, 400, "messages", "robot"),
    (CHAT, {"messages": [TURN, ANSWER]}, 400, "messages", "must have the role user"),
    (CHAT, {"messages": [PICTURE]}, 400, "messages", "'image_url'} instead of a text"),
    (CHAT, {"messages": [TURN | {"content": LONG_TEXT}]}, 400, None, "fills the context"),
    (CHAT, {"messages": [TURN], "temperature": -1}, 400, "temperature", "at least 0 and finite"),
    (CHAT, {"messages": [TURN], "n": 2}, 400, "n", "should be 1"),
    (COMPLETIONS, {"prompt": "1", "best_of": 2}, 400, "best_of", "not permitted"),
    (CHAT, {"messages": [TURN], "tools": [{}]}, 400, "tools", "not permitted"),
    (CHAT, {"messages": [TURN], "model": "gpt-5"}, 404, "model", "gpt"),
    (CHAT, b"{messages:", 400, None, "Invalid JSON"),
    (CHAT, {"messages": [BROKEN]}, 400, None, "Invalid JSON"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt", "empty"),
    (COMPLETIONS, {"prompt": "a" * (1 << 20)}, 413, None, "1,048,576 bytes"),
    ("/v1/embeddings", {}, 404, None, "Not Found"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_a_wrong_request_is_refused_with_an_error_in_openais_form(server, case):
    path, body, status, param, word = REFUSED[case]
    if isinstance(body, dict):
        body = body | {"max_tokens": 1}  # if it is not refused, its answer ends at once
    code, answer = post(server, path, body)
    error = answer["error"]
    assert (code, error["param"]) == (status, param)
    assert word in error["message"]
    assert error["type"] == "invalid_request_error"


def test_the_openai_package_understands_the_errors_and_the_model(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="mine", prompt=LONG_TEXT)
    assert refused.value.code == "context_length_exceeded"
    assert [model.id for model in client.models.list()] == ["mine"]
    assert client.models.retrieve("mine").id == "mine"
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("org/other")
    assert refused.value.code == "model_not_found"


@pytest.mark.parametrize("host", ["::1", "127.0.0.1"])
def test_the_server_listens_on_addresses_of_both_versions(host):
    try:
        socket.create_server((host, 0), family=socket.getaddrinfo(host, 0)[0][0]).close()
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with bind(host, 0) as bound:
        socket.create_connection((host, bound.getsockname()[1])).close()
    assert error_of(bind, host, 70000).startswith(f"--host {host} --port 70000: ")


def test_a_web_page_of_another_site_can_neither_ask_nor_read(server):
    """A form can send any body, but not with the Content-Type application/json."""
    body = {"messages": [TURN], "max_tokens": 2}
    assert post(server, CHAT, body, **{"Content-Type": "text/plain"})[0] == 400
    assert post(server, CHAT, body)[0] == 200
    connection = http.client.HTTPConnection(*server.address)
    asks = {"Origin": "http://other.example", "Access-Control-Request-Method": "POST"}
    for method, path in (("OPTIONS", CHAT), ("GET", "/v1/models")):
        connection.request(method, path, headers=asks)
        answer = connection.getresponse()
        answer.read()
        assert answer.getheader("Access-Control-Allow-Origin") is None


@pytest.mark.parametrize("hosts", [(*LOCAL, "llm.example.org"), LOCAL, ("*",)])
def test_only_a_local_server_refuses_other_host_names(hosts):
    settings = {"worker": None, "tokenizer": None, "context": 8, "sampling": Sampling()}
    client = TestClient(make_app(Served(**settings, name="a", hosts=hosts)))
    strangers = ["evil.example:8000", "localhost.evil.example"]
    strangers += [] if "llm.example.org" in hosts else ["llm.example.org"]
    for host in ("127.0.0.1:8000", "localhost:1", "[::1]:8000", "llm.example.org", *strangers):
        answer = client.get("/v1/models", headers={"Host": host})
        if host in strangers and "*" not in hosts:
            assert answer.status_code == 400
            assert f"--allowed_host {host.split(':')[0]}" in answer.json()["error"]["message"]
        else:
            assert answer.status_code == 200
