"""OpenAI's interface as an application: its paths, and how answers go out."""

import asyncio
import html
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse

from data.tokenizer import Tokenizer
from inference.sampling import Sampling
from inference.server.listen import Gate
from inference.server.replies import FAILED, ApiError, Reply, as_json, in_openai_form, json_response
from inference.server.requests import Asked, ChatAsked, CompletionAsked
from inference.text_stream import StreamedText
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
    hosts: tuple[str, ...] = ()  # names under which the server answers; () for any


def make_app(served: Served) -> FastAPI:
    """Return the application; its paths are OpenAI's, "/health" and the page at "/"."""
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
        return await answer(served, asked, request)

    @app.post("/v1/completions")
    async def completions(asked: CompletionAsked, request: Request) -> Response:
        return await answer(served, asked, request)

    return app


def require_model(served: Served, name: str | None) -> None:
    """Raises ApiError: another model than the one that is served."""
    if name not in (None, served.name):
        message = f"there is no model {name!r} here, only {served.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


async def answer(served: Served, asked: Asked, request: Request) -> Response:
    """Have a prompt continued, and send what comes. Raises ApiError: it cannot be."""
    require_model(served, asked.model)
    loop, inbox = asyncio.get_running_loop(), asyncio.Queue()

    def deliver(*piece: str | None) -> None:
        with suppress(RuntimeError):  # the loop has ended, and with it the program
            loop.call_soon_threadsafe(inbox.put_nowait, piece)

    try:
        prompt, next_ids = await run_in_threadpool(asked.encode, served.tokenizer)
    except ValueError as error:
        raise ApiError(400, str(error), param=asked.prompt_field) from error
    room = served.context - len(prompt)
    if room < 1:
        raise ApiError(
            400,
            f"{len(prompt)} tokens leave no room for an answer: the context of this model has "
            f"{served.context}",
            param=asked.prompt_field,
            code="context_length_exceeded",
        )
    try:
        text = StreamedText(
            prompt=prompt,
            max_new_tokens=min(asked.max_completion_tokens or asked.max_tokens or room, room),
            sampling=asked.sampling(served.sampling),
            next_ids=next_ids,
            tokenizer=served.tokenizer,
            deliver=deliver,
            stop=tuple(asked.stop),
        )
        served.worker.submit(text)
    except ValueError as error:  # a setting outside its limits, which the message begins with
        raise ApiError(400, str(error), param=str(error).split()[0]) from error
    except BusyError as error:
        raise ApiError(429, str(error)) from error
    reply = Reply(isinstance(asked, ChatAsked), served.name)
    if not asked.stream:
        return await whole(inbox, text, reply, request)
    return StreamingResponse(
        events(inbox, text, reply, asked.stream_options.include_usage),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store"},
        background=BackgroundTask(text.cancel),  # the client may have left
    )


async def events(
    inbox: asyncio.Queue, text: StreamedText, reply: Reply, with_usage: bool
) -> AsyncIterator[bytes]:
    """Yield the text as it comes, as server-sent events."""

    def event(value: dict) -> bytes:
        return b"data: " + as_json(value) + b"\n\n"

    if reply.chat:
        yield event(reply.chunk(role="assistant", content=""))
    finish_reason = None
    while not finish_reason:
        piece, finish_reason = await inbox.get()
        if piece:
            yield event(reply.chunk(content=piece))
    if finish_reason == "error":
        yield event(FAILED.body)
        return
    yield event(reply.chunk(finish_reason))
    if with_usage:
        yield event(reply.usage_chunk(text))
    yield b"data: [DONE]\n\n"


async def whole(
    inbox: asyncio.Queue, text: StreamedText, reply: Reply, request: Request
) -> Response:
    """Return the text when it has ended; cancel it when the client leaves. Raises ApiError: it
    failed."""

    async def notice_leaving() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        inbox.put_nowait(("", "cancelled"))

    leaving, finish_reason = asyncio.create_task(notice_leaving()), None
    try:
        while not finish_reason:
            _, finish_reason = await inbox.get()
    finally:
        leaving.cancel()
        text.cancel()
    if finish_reason == "cancelled":
        return Response(status_code=499)  # which nobody reads
    if finish_reason == "error":
        raise FAILED
    return json_response(reply.whole(text))
