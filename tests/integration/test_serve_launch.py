"""The chat page in a browser, and a server process that Ctrl-C stops."""

import json
import re
import signal
import sys
from urllib.parse import urlsplit

import openai
import pytest
from browser import Browser
from conftest import SAFETY_NET_SECONDS, VOCAB_SIZE, clean_environment, wait_for
from live_server import LiveServer
from small_model import opinionated, save_model
from warm_ranks import WarmProcess

from lm.data.tokenizer_training import EOS_ID
from lm.inference.sampling import Sampling
from scripts import serve

pytestmark = pytest.mark.slow

LONG, SHORT = 1 << 16, 100  # contexts in tokens: no text fills LONG, LONG_TEXT fills SHORT
LONG_TEXT = "1 + 1 = 2; " * 60
HELLO = [{"role": "user", "content": "1 + 1"}]


@pytest.fixture
def server(packed, request):
    """A server with the context length of the test's parameter. Its default is greedy decoding."""
    greedy = Sampling(temperature=0)
    started = LiveServer("mine", packed / "tokenizer.model", request.param, greedy)
    yield started
    started.close()


def ask(browser: Browser, question: str) -> None:
    browser.run("document.querySelector('textarea').focus()")
    browser.call("Input.insertText", text=question)
    browser.press("Enter")


def texts(browser: Browser, kind: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll('.{kind}')].map((n) => n.textContent)")


def is_busy(browser: Browser) -> bool:
    return browser.run("getComputedStyle(document.querySelector('#stop')).display") != "none"


@pytest.mark.parametrize("server", [LONG], indirect=True)
@pytest.mark.parametrize(("width", "dark"), [(375, True), (1280, False)])
def test_the_page_streams_an_answer_until_it_is_stopped(browser, server, width, dark):
    expected = server.continues(server.prompt_ids("1 + 1"), 20)
    browser.open(server.url, width, dark)
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (int(paper.partition("(")[2].partition(",")[0]) < 128) == dark
    ask(browser, "1 + 1")
    wait_for(lambda: len("".join(texts(browser, "assistant"))) > len(expected))
    assert is_busy(browser)
    assert browser.run("document.documentElement.scrollWidth") <= width
    browser.run("document.querySelector('#stop').click()")
    wait_for(lambda: not is_busy(browser))
    (answer,) = texts(browser, "assistant")
    assert answer.startswith(expected)
    assert texts(browser, "user") == ["1 + 1"]
    assert texts(browser, "note") == ["Stopped."]
    place = "document.querySelector('.note').getBoundingClientRect().bottom"
    assert browser.run(f"{place} < innerHeight")  # the end of the answer is visible
    wait_for(lambda: server.n_running == 0)


@pytest.mark.parametrize("server", [SHORT], indirect=True)
def test_the_page_says_when_the_context_is_full_and_drops_the_oldest_messages(browser, server):
    ids = server.prompt_ids("1 + 1")
    says = server.continues(ids, SHORT - len(ids))
    browser.open(server.url, 375)
    said = [*HELLO, {"role": "assistant", "content": LONG_TEXT}]
    browser.run(f"messages.push(...{json.dumps(said)})")
    for question in ("1 + 1", LONG_TEXT):
        ask(browser, question)
        wait_for(lambda: not is_busy(browser))
    assert texts(browser, "assistant") == [says]
    forgotten, full, refused = texts(browser, "note")
    assert "now forgets the oldest 2 messages" in forgotten
    assert full == "The context is full: the answer ends here."
    assert "fills the context" in refused
    browser.run("document.querySelector('#new').click()")
    browser.wait_until_loaded()
    assert texts(browser, "user") == []
    assert [problem for problem in browser.problems if "400" not in problem] == []


def test_ctrl_c_ends_the_server_and_a_waiting_client_gets_an_error(packed, tmp_path, refusal):
    model, weights = opinionated(VOCAB_SIZE, LONG), tmp_path / "mine" / "weights"
    model.output.weight.data[EOS_ID] = 0  # never the most likely token: the answer does not end
    save_model(weights, model, packed)
    log = tmp_path / "log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "scripts.serve", str(weights), "--port", "0"]
        process = WarmProcess(command, clean_environment(), output)
    try:
        url = wait_for(lambda: re.search(r"^mine at (http://\S+) ", log.read_text(), re.M))[1]
        port = urlsplit(url).port
        assert "Address already in use" in refusal(serve, weights, "--port", port)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        request = {"model": "mine", "prompt": "1", "temperature": 0}
        answer = client.completions.create(**request, stream=True)
        next(answer)
        process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(answer)
        assert process.wait(SAFETY_NET_SECONDS) == 130
        assert log.read_text().splitlines()[2:] == ["serve: stopped"]
    finally:
        process.abandon()
