"""The web server: the chat page, and OpenAI's API with its paths, answers and errors."""

import asyncio
import html
import json
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from pydantic import ValidationError
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.errors import UsageError
from data.tokenizer import Tokenizer
from inference.generation import StreamedText
from inference.sampling import Sampling
from inference.server.requests import ChatRequest, CompletionRequest, GenerationRequest
from inference.worker import Worker

PAGE = Path(__file__).with_name("page.html")


@dataclass(kw_only=True)
class Served:
    """The model that is served, and the settings of the server."""

    worker: Worker
    tokenizer: Tokenizer
    context: int  # tokens
    name: str
    sampling: Sampling  # defaults for fields that a request leaves out
    max_bytes: int  # largest body of a request
    hosts: tuple[str, ...] = ("*",)  # host names that the server accepts; "*" for all
    encoders: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))


class ApiError(HTTPException):
    """A refused request, in the form of OpenAI's errors. `param` names the wrong field."""

    def __init__(self, status: int, message: str, param=None, code=None):
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error = {"message": message, "type": kind, "param": param, "code": code}
        super().__init__(status, {"error": error})


FAILED = {  # finish_reason: status, message
    "closed": (503, "the server is shutting down"),
    "error": (500, "generation failed; the server's terminal shows the reason"),
}


def make_app(served: Served) -> FastAPI:
    """Return the application with OpenAI's paths and the chat page at "/"."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    # Against DNS rebinding: a web page may point its own host name at this machine.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=served.hosts)
    app.add_exception_handler(ClientDisconnect, lambda *_: Response(status_code=499))
    page = PAGE.read_text(encoding="utf-8").replace("{{name}}", html.escape(served.name))

    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: HTTPException) -> Response:
        if isinstance(error.detail, str):  # an error of Starlette, such as 404
            error = ApiError(error.status_code, f"{request.url.path}: {error.detail}")
        return JSONResponse(error.detail, error.status_code)

    @app.get("/", response_class=HTMLResponse)
    async def chat_page() -> str:
        return page

    @app.get("/v1/models")
    async def models() -> dict:
        model = {"id": served.name, "object": "model", "created": 0, "owned_by": "local"}
        return {"object": "list", "data": [model]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(served, ChatRequest, request)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(served, CompletionRequest, request)

    return app


async def read(
    form: type[GenerationRequest], request: Request, max_bytes: int
) -> GenerationRequest:
    """Parse the body of a request. Raises ApiError if it is too large, or not JSON like `form`."""
    # Without a CORS preflight, browsers let any web page send text/plain and forms, not JSON.
    if not request.headers.get("content-type", "").startswith("application/json"):
        raise ApiError(400, "the Content-Type must be application/json")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise ApiError(413, f"a request may have {max_bytes:,} bytes at most")
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        faults = error.errors()
        messages = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults]
        param = next(iter(faults[0]["loc"]), None)
        raise ApiError(400, "; ".join(messages).removeprefix(": "), param) from error


async def answer(served: Served, form: type[GenerationRequest], request: Request) -> Response:
    """Answer a request. Raises ApiError if the request is refused."""
    fields = await read(form, request, served.max_bytes)
    if fields.model not in (None, served.name):
        message = f"there is no model {fields.model!r} here, only {served.name!r}"
        raise ApiError(404, message, "model", "model_not_found")
    try:
        sampling = fields.sampling(served.sampling)
        async with served.encoders:  # at most two at a time: encoding takes much memory
            if await request.is_disconnected():
                raise ClientDisconnect
            prompt, next_ids = await run_in_threadpool(fields.encode, served.tokenizer)
    except ValueError as error:  # its message begins with the name of the field
        raise ApiError(400, str(error), str(error).split()[0].removesuffix(":")) from error
    n_free = served.context - len(prompt)
    if n_free < 1:
        message = f"a prompt of {len(prompt)} tokens fills the context of {served.context} tokens"
        raise ApiError(400, message, code="context_length_exceeded")
    reply = Reply(form is ChatRequest, served.name)
    loop = asyncio.get_running_loop()
    text = StreamedText(
        prompt=prompt,
        max_new_tokens=min(fields.max_completion_tokens or fields.max_tokens or n_free, n_free),
        sampling=sampling,
        next_ids=next_ids,
        tokenizer=served.tokenizer,
        deliver=lambda *piece: loop.call_soon_threadsafe(reply.inbox.put_nowait, piece),
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop),
    )
    served.worker.submit(text)
    if not fields.stream:
        return await reply.whole(text, request)
    return StreamingResponse(
        reply.events(text, fields.stream_options.include_usage),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store"},
        background=BackgroundTask(text.cancel),  # for a client that disconnects
    )


class Reply:
    """The answer to one request as OpenAI's JSON, complete or in chunks."""

    def __init__(self, chat: bool, model: str):
        self.chat = chat
        self.inbox = asyncio.Queue()  # pieces of text with their finish_reason
        answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}

    async def whole(self, text: StreamedText, request: Request) -> Response:
        """Wait for the whole text, then return it. Cancel the text if the client disconnects."""
        finish_reason = None
        while not finish_reason:
            _, finish_reason = await self.inbox.get()  # one piece per token
            if await request.is_disconnected():
                text.cancel()
                return Response(status_code=499)  # nobody reads this response
        if finish_reason in FAILED:
            raise ApiError(*FAILED[finish_reason])
        message = {"role": "assistant", "content": text.text, "refusal": None}
        said = {"message": message} if self.chat else {"text": text.text}
        return JSONResponse(self._form("chat.completion", said, finish_reason) | usage(text))

    async def events(self, text: StreamedText, with_usage: bool) -> AsyncIterator[str]:
        """Yield server-sent events, one for each piece of text."""
        if self.chat:
            yield event(self._chunk(role="assistant", content=""))
        finish_reason = None
        while not finish_reason:
            piece, finish_reason = await self.inbox.get()
            if piece:
                yield event(self._chunk(content=piece))
        if finish_reason in FAILED:
            yield event(ApiError(*FAILED[finish_reason]).detail)
            return
        yield event(self._chunk(finish_reason))
        if with_usage:
            yield event(self._chunk() | {"choices": []} | usage(text))
        yield "data: [DONE]\n\n"

    def _chunk(self, finish_reason: str | None = None, **delta: str) -> dict:
        said = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        return self._form("chat.completion.chunk", said, finish_reason)

    def _form(self, kind: str, said: dict, finish_reason: str | None) -> dict:
        choice = said | {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        kind = kind if self.chat else "text_completion"
        return self._head | {"object": kind, "choices": [choice]}


def event(value: dict) -> str:
    return f"data: {json.dumps(value)}\n\n"


def usage(text: StreamedText) -> dict:
    read, written = len(text.prompt), len(text.ids)
    counts = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    return {"usage": counts}


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises UsageError if the address cannot be used."""
    try:
        return socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        raise UsageError(f"--host {host} --port {port}: {error}") from error


class Connection(H11Protocol):
    """A connection that is refused with status 503 if too many connections are open."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) >= self.limit_concurrency:
            self.connections.discard(self)
            self.abort(503, "too many connections: try again later")

    def abort(self, status: int, message: str) -> None:
        """Close the connection. If no answer has begun, send this error first."""
        if not (self.cycle and self.cycle.response_started):
            head = (f"HTTP/1.1 {status} ", "Connection: close", "Content-Type: application/json")
            error = json.dumps(ApiError(status, message).detail)
            self.transport.write("\r\n".join([*head, "", error]).encode())
        self.transport.abort()


class Server(uvicorn.Server):
    """An HTTP server that runs until SIGINT or SIGTERM. Unfinished answers then fail."""

    def __init__(self, served: Served):
        config = uvicorn.Config(make_app(served), http=Connection, log_level="warning", ws="none")
        config.limit_concurrency = min(128, os.sysconf("SC_OPEN_MAX") // 2)  # each needs a file
        config.backlog = config.limit_concurrency // 4  # most that asyncio accepts at once
        config.timeout_graceful_shutdown = 5  # seconds
        super().__init__(config)
        self.patience = 20.0  # seconds for a client to send a request or to read more of an answer
        self._worker = served.worker
        self._since: dict[tuple, float] = {}  # `awaited` → when this wait began

    async def on_tick(self, counter: int) -> bool:
        """Called every 0.1 s: close connections of slow clients; at shutdown (True) close all."""
        ends = await super().on_tick(counter)
        if ends:
            self._worker.close()
            await asyncio.sleep(0.1)  # lets answers that have begun send their final error
        now, before, self._since = time.monotonic(), self._since, {}
        for each in list(self.server_state.connections):
            cycle = each.cycle  # uvicorn makes one cycle per request
            awaited = (each, cycle, each.transport.get_write_buffer_size())
            if not cycle or cycle.more_body or cycle.response_complete or each.flow.write_paused:
                self._since[awaited] = before.get(awaited, now)
            if ends or now - self._since.get(awaited, now) > self.patience:
                each.abort(*(FAILED["closed"] if ends else (408, "the request came too late")))
        return ends
