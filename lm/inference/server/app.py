"""The web server: the chat page, and OpenAI's API with its paths, answers and errors."""

import asyncio
import html
import json
import logging
import socket
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import Depends, FastAPI
from pydantic import ValidationError
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from lm.common.errors import UsageError
from lm.data.tokenizer import Tokenizer
from lm.inference.generation import StreamedText
from lm.inference.sampling import Sampling
from lm.inference.server.requests import ChatRequest, CompletionRequest, GenerationRequest
from lm.inference.server.worker import Worker

PAGE = Path(__file__).with_name("page.html")
MAX_BYTES = 1 << 20  # largest body of a request


@dataclass(kw_only=True)
class Served:
    """The model that is served, and the settings of the server."""

    worker: Worker
    tokenizer: Tokenizer
    context: int  # tokens
    name: str
    sampling: Sampling  # defaults for fields that a request leaves out
    hosts: tuple[str, ...] = ("*",)  # host names that the server accepts; "*" for all


class ApiError(HTTPException):
    """An HTTP error in the form of OpenAI's errors. `param` names the wrong field, if any."""

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

    async def check_host(request: Request) -> None:
        # Against DNS rebinding: a web page may point its own host name at this machine.
        if not {"*", request.url.hostname} & set(served.hosts):
            raise ApiError(400, f"start the server with --allowed_host {request.url.hostname}")

    app = FastAPI(openapi_url=None, dependencies=[Depends(check_host)])
    app.add_exception_handler(ClientDisconnect, lambda *_: Response(status_code=499))
    page = PAGE.read_text(encoding="utf-8").replace("{{name}}", html.escape(served.name))

    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: HTTPException) -> Response:
        if isinstance(error.detail, str):  # an error of Starlette, such as 404
            error = ApiError(error.status_code, f"{request.url.path}: {error.detail}")
        return JSONResponse(error.detail, error.status_code)

    described = {"id": served.name, "object": "model", "created": 0, "owned_by": "local"}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict:
        require_model(served, name)
        return described

    app.get("/v1/models")(lambda: {"object": "list", "data": [described]})
    app.get("/", response_class=HTMLResponse)(lambda: page)
    app.post("/v1/chat/completions")(partial(answer, served, ChatRequest))
    app.post("/v1/completions")(partial(answer, served, CompletionRequest))
    return app


async def read(form: type[GenerationRequest], request: Request) -> GenerationRequest:
    """Parse the body of a request. Raises ApiError if its type, size or content is wrong."""
    # Browsers let any web page send text/plain and forms here, but JSON only if we allow it.
    if not request.headers.get("content-type", "").startswith("application/json"):
        raise ApiError(400, "the Content-Type must be application/json")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BYTES:
            raise ApiError(413, f"a request may have {MAX_BYTES:,} bytes at most")
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        faults = error.errors()
        messages = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults]
        param = next(iter(faults[0]["loc"]), None)
        raise ApiError(400, "; ".join(messages).removeprefix(": "), param) from error


def require_model(served: Served, name: str | None) -> None:
    """Raise ApiError if a request names another model than the one that is served."""
    if name not in (None, served.name):
        message = f"there is no model {name!r} here, only {served.name!r}"
        raise ApiError(404, message, "model", "model_not_found")


async def answer(served: Served, form: type[GenerationRequest], request: Request) -> Response:
    """Answer a request. Raises ApiError if the request is refused or, without stream, fails."""
    fields = await read(form, request)
    require_model(served, fields.model)
    try:
        sampling = fields.sampling(served.sampling)
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
        background=BackgroundTask(text.end),  # for a client that disconnects
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
                text.end()
                return Response(status_code=499)  # nobody reads this response
        if finish_reason in FAILED:
            raise ApiError(*FAILED[finish_reason])
        message = {"role": "assistant", "content": text.text, "refusal": None}
        said = {"message": message} if self.chat else {"text": text.text}
        return JSONResponse(self._form("chat.completion", said, finish_reason) | usage(text))

    async def events(self, text: StreamedText, with_usage: bool) -> AsyncIterator[str]:
        """Yield server-sent events: role (chat only), non-empty pieces, the end or an error."""
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
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise UsageError(f"--host {host} --port {port}: {error}") from error


def once_per_kind() -> Callable[[logging.LogRecord], bool]:
    """Return a logging filter that lets each kind of message pass once, because clients can repeat
    a failure until a disk is full."""
    seen = Counter()

    def is_new(record: logging.LogRecord) -> bool:
        kind = record.getMessage().split("\n")[0], record.exc_info and record.exc_info[0]
        seen[kind] += 1
        return seen[kind] == 1

    return is_new


class Server(uvicorn.Server):
    """An HTTP server that runs until SIGINT or SIGTERM. Unfinished answers then fail."""

    def __init__(self, served: Served):
        limits = {"limit_concurrency": 128, "timeout_graceful_shutdown": 5}  # connections, seconds
        super().__init__(uvicorn.Config(make_app(served), log_level="warning", ws="none", **limits))
        self._worker = served.worker
        for name in ("uvicorn.error", "asyncio"):
            logging.getLogger(name).addFilter(once_per_kind())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._worker.close()  # all waiting clients get an error
        await super().shutdown(sockets)
