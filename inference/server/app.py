"""OpenAI's interface as an application: its paths, and how answers go out."""

import asyncio
import html
from collections.abc import AsyncIterator, Sequence
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

from common.errors import UsageError
from data.chat_template import encode_chat_prompt
from data.conversations import check_turns
from data.errors import DataError
from data.tokenizer import Tokenizer
from inference.prompts import require_text
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
        require_model(served, asked.model)
        ids = await run_in_threadpool(chat_prompt, served, asked)
        return await answer(served, asked, request, ids)

    @app.post("/v1/completions")
    async def completions(asked: CompletionAsked, request: Request) -> Response:
        require_model(served, asked.model)
        ids, next_ids = await run_in_threadpool(completion_prompt, served, asked)
        return await answer(served, asked, request, ids, next_ids)

    return app


def require_model(served: Served, name: str | None) -> None:
    """Raises ApiError: another model than the one that is served."""
    if name not in (None, served.name):
        message = f"there is no model {name!r} here, only {served.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def chat_prompt(served: Served, asked: ChatAsked) -> list[int]:
    """Return token ids. Raises ApiError: no conversation with a question at its end."""
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
    served: Served, asked: Asked, request: Request, prompt: list[int], next_ids: Sequence[int] = ()
) -> Response:
    """Have the prompt continued, and send what comes. Raises ApiError: it cannot be."""
    loop, inbox = asyncio.get_running_loop(), asyncio.Queue()
    chat, room = isinstance(asked, ChatAsked), served.context - len(prompt)

    def deliver(*piece: str | None) -> None:
        with suppress(RuntimeError):  # the loop has ended, and with it the program
            loop.call_soon_threadsafe(inbox.put_nowait, piece)

    if room < 1:
        raise ApiError(
            400,
            f"{len(prompt)} tokens leave no room for an answer: the context of this model has "
            f"{served.context}",
            param="messages" if chat else "prompt",
            code="context_length_exceeded",
        )
    try:
        text = StreamedText(
            prompt=prompt,
            max_new_tokens=min(asked.max_new_tokens or room, room),
            sampling=asked.sampling(served.sampling),
            next_ids=next_ids,
            tokenizer=served.tokenizer,
            deliver=deliver,
            stop=tuple(asked.stop or ()),
        )
        served.worker.submit(text)
    except ValueError as error:
        raise ApiError(400, str(error), param=str(error).split()[0]) from error
    except BusyError as error:
        raise ApiError(429, str(error)) from error
    reply = Reply(chat, served.name)
    if not asked.stream:
        return await whole(inbox, text, reply, request)
    with_usage = bool(asked.stream_options and asked.stream_options.include_usage)
    return StreamingResponse(
        events(inbox, text, reply, with_usage),
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
