"""OpenAI's interface as an application: paths, their requests, how answers go out."""

import asyncio
import html
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import UsageError
from data.chat_template import encode_chat_prompt
from data.conversations import check_turns
from data.errors import DataError
from data.tokenizer import Tokenizer
from inference.continuation import Continuation, TooLongError
from inference.prompts import require_text
from inference.sampling import Sampling
from inference.server.replies import (
    FAILED,
    ApiError,
    Reply,
    as_json,
    event,
    in_openai_form,
    json_response,
)
from inference.server.requests import Asked, ChatAsked, CompletionAsked
from inference.worker import BusyError, Worker

PAGE = Path(__file__).with_name("page.html")


@dataclass(kw_only=True)
class Served:
    """A model that is offered."""

    worker: Worker
    tokenizer: Tokenizer
    context: int  # tokens
    name: str
    sampling: Sampling  # where a request does not say
    max_bytes: int  # of a request's body
    hosts: tuple[str, ...] = ()  # by whose names it may be asked; () for any


def make_app(served: Served) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Gate, max_bytes=served.max_bytes, hosts=served.hosts)
    for kind in (RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, in_openai_form)
    model = {"id": served.name, "object": "model", "created": 0, "owned_by": "local"}
    page = PAGE.read_text(encoding="utf-8")
    page = page.replace("{{name}}", html.escape(served.name))
    page = page.replace("{{temperature}}", str(served.sampling.temperature))

    @app.get("/")
    async def talk() -> Response:
        return HTMLResponse(page)

    @app.get("/health")
    async def health() -> Response:
        return json_response(served.worker.load)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")  # which may have slashes
    async def one_model(name: str) -> Response:
        require_model(served, name)
        return json_response(model)

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatAsked, request: Request) -> Response:
        require_model(served, asked.model)
        ids = await run_in_threadpool(chat_prompt, served, asked)
        most = asked.max_completion_tokens or asked.max_tokens
        return await answer(served, asked, request, ids, max_new_tokens=most)

    @app.post("/v1/completions")
    async def completions(asked: CompletionAsked, request: Request) -> Response:
        require_model(served, asked.model)
        ids, next_ids = await run_in_threadpool(completion_prompt, served, asked)
        more = {"max_new_tokens": asked.max_tokens, "next_ids": next_ids}
        return await answer(served, asked, request, ids, **more)

    return app


class Gate:
    """Raises ApiError when more of a request's body comes than is allowed, and answers to no name
    but `hosts`: a stranger's page whose own name suddenly leads to this machine (DNS rebinding)
    could read what is said here."""

    def __init__(self, app: ASGIApp, max_bytes: int, hosts: tuple[str, ...]):
        self.app, self.max_bytes, self.hosts = app, max_bytes, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = re.sub(r":\d*$", "", Headers(scope=scope).get("host", "")).strip("[]").lower()
        if self.hosts and host not in self.hosts:
            known = f"it is {' or '.join(self.hosts)}, unless --host is another"
            error = ApiError(403, f"this server is not called {host!r}: {known}")
            return await json_response(error.body, error.status_code)(scope, receive, send)
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                raise ApiError(413, f"a request may have {self.max_bytes:,} bytes at most")
            return message

        await self.app(scope, counted, send)


def require_model(served: Served, name: str | None) -> None:
    """Raises ApiError: not the one that there is."""
    if name not in (None, served.name):
        message = f"there is no model {name!r} here, only {served.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def chat_prompt(served: Served, asked: ChatAsked) -> list[int]:
    """Token ids. Raises ApiError: messages that are no conversation with a question at its end."""
    turns = asked.turns
    try:
        check_turns(turns, "messages")
    except DataError as error:
        raise ApiError(400, str(error), param="messages") from error
    if turns[-1].role != "user":
        raise ApiError(400, "messages: the last has to be the user's", param="messages")
    return encode_chat_prompt(served.tokenizer, turns)


def completion_prompt(served: Served, asked: CompletionAsked) -> tuple[list[int], list[int]]:
    """As `Tokenizer.encode_prompt`. Raises ApiError: an empty prompt, or one that is no text."""
    try:
        return served.tokenizer.encode_prompt(require_text(asked.prompt))
    except UsageError as error:
        raise ApiError(400, str(error), param="prompt") from error


async def answer(
    served: Served, asked: Asked, request: Request, prompt: list[int], **how
) -> Response:
    """Have the prompt continued, and send what comes. Raises ApiError: it cannot be."""
    loop, inbox = asyncio.get_running_loop(), asyncio.Queue()

    def deliver(*piece: str | None) -> None:
        with suppress(RuntimeError):  # the loop has ended, and with it the program
            loop.call_soon_threadsafe(inbox.put_nowait, piece)

    chat = isinstance(asked, ChatAsked)
    try:
        sampling = asked.sampling(served.sampling)
        stop = tuple(asked.stop or ())
        options = how | {"deliver": deliver, "stop": stop}
        text = Continuation(served.tokenizer, prompt, sampling, served.context, **options)
        served.worker.submit(text)
    except TooLongError as error:
        too_long = {"param": "messages" if chat else "prompt", "code": "context_length_exceeded"}
        raise ApiError(400, str(error), **too_long) from error
    except ValueError as error:
        raise ApiError(400, str(error), param=str(error).split()[0]) from error
    except BusyError as error:
        raise ApiError(429, str(error)) from error
    reply = Reply(chat, served.name)
    if asked.stream:
        with_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        return EventStream(events(inbox, text, reply, with_usage), text)
    return await whole(inbox, text, reply, request)


class EventStream(StreamingResponse):
    """Server-sent events about a text, which is given up when the client leaves."""

    def __init__(self, content: AsyncIterator[bytes], text: Continuation):
        super().__init__(content, media_type="text/event-stream")
        self.headers["Cache-Control"] = "no-store"
        self.text = text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.text.cancel()


async def events(
    inbox: asyncio.Queue, text: Continuation, reply: Reply, with_usage: bool
) -> AsyncIterator[bytes]:
    """The text as it comes."""
    if reply.chat:
        yield event(as_json(reply.chunk(role="assistant", content="")))
    finish_reason = None
    while not finish_reason:
        piece, finish_reason = await inbox.get()
        if piece:
            yield event(as_json(reply.chunk(content=piece)))
    if finish_reason == "error":
        yield event(as_json(FAILED.body))
        return
    yield event(as_json(reply.chunk(finish_reason)))
    if with_usage:
        yield event(as_json(reply.usage_chunk(text)))
    yield event(b"[DONE]")


async def whole(
    inbox: asyncio.Queue, text: Continuation, reply: Reply, request: Request
) -> Response:
    """The text when it has ended, unless the client leaves before. Raises ApiError: it failed."""
    pieces, finish_reason = [], None
    leaving = asyncio.create_task(notice_leaving(request, inbox))
    try:
        while not finish_reason:
            piece, finish_reason = await inbox.get()
            pieces.append(piece)
    finally:
        leaving.cancel()
        text.cancel()
    if finish_reason == "cancelled":
        return Response(status_code=499)  # which nobody reads
    if finish_reason == "error":
        raise FAILED
    return json_response(reply.whole("".join(pieces), text))


async def notice_leaving(request: Request, inbox: asyncio.Queue) -> None:
    """Put an end into the inbox when the client leaves, though nothing has been written yet."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    inbox.put_nowait(("", "cancelled"))
