"""A real server, asked as people do: by the openai package, by hand, wrongly, in a browser."""

import http.client
import itertools
import json
import signal
import socket
import sys
from urllib.parse import urlsplit

import openai
import pytest
from browser import Browser
from conftest import SAFETY_NET_SECONDS, VOCAB_SIZE, run_warm
from server_process import ServerProcess, wait_until, write_model

from data.chat_template import encode_chat_prompt
from data.conversations import Turn
from data.tokenizer import Tokenizer
from formats.portable import load_portable
from inference.generation import generate
from inference.sampling import Sampling

pytestmark = pytest.mark.slow

LONG, SHORT = 1 << 16, 100  # contexts: no text ends in the first, questions fill the second
MAX_KB = 64
HELLO = [{"role": "user", "content": "1 + 1"}]
SERVE = [sys.executable, "-m", "scripts.serve"]


@pytest.fixture(scope="module")
def weights(packed, tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("models"), packed / "tokenizer.model"
    return {
        name: write_model(folder / name / "weights", tokenizer, VOCAB_SIZE, context)
        for name, context in (("long", LONG), ("short", SHORT))
    }


@pytest.fixture(scope="module")
def servers(weights, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    started = {
        name: ServerProcess(path, logs / name, "--max_request_kb", str(MAX_KB))
        for name, path in weights.items()
    }
    yield started
    for server in started.values():
        server.process.abandon()


@pytest.fixture(scope="module")
def server(servers):
    return servers["long"]


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def continued(weights):
    """What the model says after these ids, without a server; greedy unless told otherwise."""
    model, tokenizer = (
        load_portable(weights["long"]),
        Tokenizer(weights["long"] / "tokenizer.model"),
    )

    def text(ids: list[int], n: int, **sampling) -> str:
        settings = Sampling(**{"temperature": 0, "top_k": 50} | sampling)
        (new,) = generate(model, [ids], n, settings)
        return tokenizer.decode([*tokenizer.encode("x"), *new])[1:]

    text.tokenizer = tokenizer
    return text


@pytest.fixture(scope="module")
def hello(continued):
    ids = encode_chat_prompt(continued.tokenizer, [Turn("user", "1 + 1")])
    return ids, continued(ids, 20)


def test_a_chat_answer_is_what_the_model_says_after_the_template(client, hello):
    ids, expected = hello
    answer = client.chat.completions.create(
        model="long", messages=HELLO, max_tokens=20, temperature=0
    )
    (choice,) = answer.choices
    assert choice.message.content == expected
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), 20)
    assert usage.total_tokens == len(ids) + 20
    assert answer.model == "long"


def test_it_streams_the_same_in_pieces(client, hello):
    chunks = list(
        client.chat.completions.create(
            model="long",
            messages=HELLO,
            max_completion_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *texts, last = chunks
    pieces = [chunk.choices[0].delta.content or "" for chunk in texts]
    assert "".join(pieces) == hello[1]
    assert sum(map(bool, pieces)) > 5
    assert texts[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in texts]
    assert reasons == [None] * (len(texts) - 1) + ["length"]
    assert last.choices == []
    assert last.usage.completion_tokens == 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_is_completed_up_to_a_stop_string(client, continued, stream):
    tokenizer = continued.tokenizer
    whole = continued([tokenizer.bos_id, *tokenizer.encode("sum 1:")], 20)
    stop = whole[6:9]
    answer = client.completions.create(
        model="long", prompt="sum 1:", temperature=0, stop=[stop, "not there"], stream=stream
    )
    if stream:
        chunks = list(answer)
        text = "".join(chunk.choices[0].text for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
    assert (text, reason) == (whole.partition(stop)[0], "stop")


def test_sampling_is_what_was_asked_for(client, continued, hello):
    ids, greedy = hello
    settings = {"temperature": 1.8, "top_p": 0.9, "seed": 11}
    more = {"top_k": 0, "min_p": 0.01, "repetition_penalty": 1.2}
    asked = {"model": "long", "messages": HELLO, "max_tokens": 20} | settings
    answer = client.chat.completions.create(**asked, extra_body=more)
    text = answer.choices[0].message.content
    assert text == continued(ids, 20, **settings, **more) != greedy
    free = {**asked, "seed": None}
    drawn = {client.chat.completions.create(**free).choices[0].message.content for _ in range(4)}
    assert len(drawn) > 1  # a seed of its own each time


def test_models_are_listed_under_the_name_of_their_run(client):
    assert [model.id for model in client.models.list()] == ["long"]
    assert client.models.retrieve("long").id == "long"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_several_are_answered_while_a_long_answer_goes_on(client, server, hello):
    asked = {"model": "long", "messages": HELLO, "temperature": 0}
    endless = client.chat.completions.create(**asked, stream=True)
    assert len(list(itertools.islice(endless, 5))) == 5
    for _ in range(2):
        answer = client.chat.completions.create(**asked, max_tokens=20)
        assert answer.choices[0].message.content == hello[1]
    assert server.load()["running"] == 1
    assert next(endless).choices[0].finish_reason is None
    endless.close()
    wait_until(lambda: server.load()["running"] == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_its_work(client, server, stream):
    body = json.dumps({"messages": HELLO, "stream": stream}).encode()
    address = urlsplit(server.url)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection((address.hostname, address.port)) as leaving:
        leaving.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        wait_until(lambda: server.load()["running"] == 1)
    # The clock is another answer, of half as many tokens: the one that was left would outlast it.
    clock = client.completions.create(
        model="long", prompt="1", max_tokens=LONG // 2, temperature=0, stream=True
    )
    assert any(server.load()["running"] == 1 for _ in clock)
    clock.close()
    wait_until(lambda: server.load()["running"] == 0)


def post(server: ServerProcess, path: str, body, **headers: str) -> tuple[int, dict]:
    """A request made by hand: status and JSON of the answer."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname, address.port)
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    connection.request("POST", path, body, {"Content-Type": "application/json"} | headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG_TEXT = "1 + 1 = 2; " * 60
TURN = {"role": "user", "content": "1"}
MESSAGE = b'{"messages": [{"role": "user", "content": "%b"}]}'
NONSENSE = {  # what is wrong: path, body, status, the parameter to blame, a word of the message
    "no JSON": (CHAT, b"{messages:", 400, None, "no JSON"),
    "an empty body": (CHAT, b"", 400, None, "JSON object"),
    "a list": (CHAT, [], 400, None, "JSON object"),
    "brackets without end": (CHAT, b"[" * 60_000, 400, None, ""),
    "a huge number": (CHAT, b'{"seed": ' + b"9" * 9999 + b"}", 400, None, ""),
    "no messages": (CHAT, {}, 400, "messages", "required"),
    "empty messages": (CHAT, {"messages": []}, 400, "messages", "at least 1"),
    "messages of text": (CHAT, {"messages": "hello"}, 400, "messages", "list"),
    "an unknown role": (CHAT, {"messages": [TURN | {"role": "robot"}]}, 400, "messages", "robot"),
    "two questions": (CHAT, {"messages": [TURN, TURN]}, 400, "messages", "assistant"),
    "an answer last": (
        *(CHAT, {"messages": [TURN, {"role": "assistant", "content": "2"}]}),
        *(400, "messages", "the last has to be the user's"),
    ),
    "a picture": (
        *(CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        *(400, "messages", "text alone"),
    ),
    "half a character": (CHAT, MESSAGE % b"\\ud800", 400, "messages", ""),
    "half a name": (CHAT, b'{"messages": [], "\\ud800": 1}', 400, None, "JSON object"),
    "an unknown model": (CHAT, {"messages": [TURN], "model": "gpt-5"}, 404, "model", "gpt"),
    "a cold temperature": (CHAT, {"messages": [TURN], "temperature": -1}, 400, "temperature", "-1"),
    "no number": (CHAT, MESSAGE % b'1"}], "top_p": NaN, "a": [{"b": "', 400, "top_p", "finite"),
    "a word as a number": (CHAT, {"messages": [TURN], "top_p": "0.5"}, 400, "top_p", "number"),
    "no tokens": (CHAT, {"messages": [TURN], "max_tokens": 0}, 400, "max_tokens", "1"),
    "two answers": (CHAT, {"messages": [TURN], "n": 2}, 400, "n", "1"),
    "a tool": (CHAT, {"messages": [TURN], "tools": [{}]}, 400, "tools", "0"),
    "a slip": (CHAT, {"messages": [TURN], "temprature": 1}, 400, "temprature", "not know it"),
    "five stops": (CHAT, {"messages": [TURN], "stop": list("abcde")}, 400, "stop", "4"),
    "a long question": (
        *(CHAT, {"messages": [TURN | {"content": LONG_TEXT}]}),
        *(400, "messages", "no room for an answer"),
    ),
    "a long prompt": (COMPLETIONS, {"prompt": LONG_TEXT}, 400, "prompt", "no room"),
    "no prompt": (COMPLETIONS, {"prompt": ""}, 400, "prompt", "empty"),
    "two prompts": (COMPLETIONS, {"prompt": ["a", "b"]}, 400, "prompt", "string"),
    "too much": (COMPLETIONS, {"prompt": "a" * MAX_KB * 1024}, 413, None, "65,536 bytes"),
    "another path": ("/v1/embeddings", {}, 404, None, "Not Found"),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_is_answered_in_openais_form_and_never_with_a_traceback(servers, what):
    path, body, status, param, word = NONSENSE[what]
    code, answer = post(servers["short"], path, body)
    error = answer["error"]
    assert (code, error["param"]) == (status, param)
    assert word in error["message"]
    assert error["type"] == "invalid_request_error"
    assert "Traceback" not in servers["short"].said


def test_a_form_on_a_strangers_page_cannot_ask(servers):
    """It can send any body from a browser, but not with this Content-Type."""
    for kind in ("text/plain", ""):
        sent = {"Content-Type": kind}
        assert post(servers["short"], CHAT, {"messages": [TURN], "max_tokens": 2}, **sent)[0] == 400
    assert post(servers["short"], CHAT, {"messages": [TURN], "max_tokens": 2})[0] == 200


def test_the_openai_package_understands_the_errors(servers):
    client = openai.OpenAI(base_url=f"{servers['short'].url}/v1", api_key="none", max_retries=0)
    ask = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as refused:
        ask(model="short", messages=[{"role": "user", "content": LONG_TEXT}])
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as refused:
        ask(model="gpt-4", messages=HELLO)
    assert refused.value.code == "model_not_found"


def ask(browser: Browser, question: str) -> None:
    browser.run("document.querySelector('textarea').focus()")
    browser.call("Input.insertText", text=question)
    browser.press("Enter")


def texts(browser: Browser, kind: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll('.{kind}')].map((n) => n.textContent)")


def is_busy(browser: Browser) -> bool:
    return browser.run("getComputedStyle(document.querySelector('#stop')).display") != "none"


def set_temperature(browser: Browser, value: float) -> None:
    slide = "const t = document.querySelector('input'); t.value = '%s';"
    browser.run("{" + slide % value + "t.dispatchEvent(new Event('input'))}")


@pytest.mark.parametrize(("width", "dark"), [(375, True), (375, False), (1280, False)])
def test_the_page_streams_an_answer_until_it_is_stopped(browser, server, hello, width, dark):
    browser.open(server.url, width, dark)
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (int(paper.partition("(")[2].partition(",")[0]) < 128) == dark
    assert browser.run("document.querySelector('h1').textContent") == "long"
    set_temperature(browser, 0)
    ask(browser, "1 + 1")
    (begun,) = wait_until(lambda: list(filter(None, texts(browser, "assistant"))))
    wait_until(lambda: len(texts(browser, "assistant")[0]) > len(begun) + len(hello[1]))
    assert is_busy(browser)
    assert browser.run("document.documentElement.scrollWidth") <= width
    browser.run("document.querySelector('#stop').click()")
    wait_until(lambda: not is_busy(browser))
    (answer,) = texts(browser, "assistant")
    assert answer.startswith(begun)
    assert answer.startswith(hello[1])
    assert texts(browser, "user") == ["1 + 1"]
    assert texts(browser, "note") == ["Stopped."]
    place = "document.querySelector('.note').getBoundingClientRect().bottom"
    assert browser.run(f"{place} < innerHeight")  # the end is what one sees
    wait_until(lambda: server.load() == {"running": 0, "waiting": 0})


def test_the_page_says_when_the_context_is_full_and_forgets_the_oldest(browser, servers, continued):
    def says(question: str) -> str:
        ids = encode_chat_prompt(continued.tokenizer, [Turn("user", question)])
        return continued(ids, SHORT - len(ids))

    browser.open(servers["short"].url, 375)
    set_temperature(browser, 0)
    said = [TURN, {"role": "assistant", "content": LONG_TEXT}]
    browser.run(f"history.push(...{json.dumps(said)})")
    for question in ("1 + 1", "2 + 2", LONG_TEXT):
        ask(browser, question)
        wait_until(lambda: not is_busy(browser))
    assert texts(browser, "assistant") == [says("1 + 1"), says("2 + 2")]
    forgotten, first, second, refused = texts(browser, "note")
    assert "does not see the oldest 2 messages" in forgotten
    assert first == second
    assert first.startswith("The context is full: the answer ends here. From here on")
    assert first.endswith("does not see the oldest 2 messages.")
    assert "no room for an answer" in refused
    browser.run("document.querySelector('#new').click()")
    assert texts(browser, "user") == []
    ask(browser, "1 + 1")
    wait_until(lambda: not is_busy(browser))
    assert texts(browser, "assistant") == [says("1 + 1")]
    assert [problem for problem in browser.problems if "400" not in problem] == []


def test_ctrl_c_ends_the_server_and_tells_whoever_waits(weights, tmp_path):
    server = ServerProcess(weights["long"], tmp_path / "log")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    taken = run_warm([*SERVE, str(weights["long"]), "--port", str(urlsplit(server.url).port)])
    assert (taken.code, taken.out.count("\n")) == (2, 1)
    assert "Address already in use" in taken.out
    answer = client.chat.completions.create(model="long", messages=HELLO, stream=True)
    next(answer)
    server.process.send_signal(signal.SIGINT)
    with pytest.raises(openai.APIError, match="could not write this"):
        list(answer)
    assert server.process.wait(SAFETY_NET_SECONDS) == 130
    assert server.said.splitlines()[1:] == ["serve: stopped"]
