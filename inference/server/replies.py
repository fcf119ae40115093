"""Answers in OpenAI's form: whole, in chunks, or an error."""

import json
import time
import uuid

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from inference.server.requests import ONLY
from inference.text_stream import StreamedText


def as_json(value: dict) -> bytes:
    """Half a character, as a request may hold one, stays the escape that it was written as."""
    return json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace")


def json_response(value: dict, status: int = 200) -> Response:
    return Response(as_json(value), status, media_type="application/json")


class Reply:
    """The answer to one request.

    Args:
        chat: whether it is an answer in a conversation.
        model: the model's name.
    """

    def __init__(self, chat: bool, model: str):
        self.chat = chat
        number = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": number, "created": int(time.time()), "model": model}

    def whole(self, text: StreamedText) -> dict:
        message = {"role": "assistant", "content": text.text, "refusal": None}
        said = {"message": message} if self.chat else {"text": text.text}
        return self._object("chat.completion", said, text.finish_reason) | _usage(text)

    def chunk(self, finish_reason: str | None = None, **delta: str) -> dict:
        """A piece of an answer: `content`, at the beginning the `role` as well."""
        said = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        return self._object("chat.completion.chunk", said, finish_reason)

    def usage_chunk(self, text: StreamedText) -> dict:
        return self.chunk() | {"choices": []} | _usage(text)

    def _object(self, kind: str, said: dict, finish_reason: str | None) -> dict:
        choice = said | {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        kind = kind if self.chat else "text_completion"
        return self._head | {"object": kind, "choices": [choice]}


def _usage(text: StreamedText) -> dict:
    read, written = len(text.prompt), text.n_tokens
    counts = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    return {"usage": counts}


class ApiError(HTTPException):
    """A request that is refused.

    Args:
        status: of HTTP.
        message: the reason, for people.
        param: name of the field in the request that is to blame.
        code: the reason, for programs.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ):
        super().__init__(status, message)
        kinds = {429: "rate_limit_error", 500: "server_error"}
        kind = kinds.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


FAILED = ApiError(500, "the server could not write this; its terminal shows the reason")


async def in_openai_form(request: Request, error: Exception) -> Response:
    """Return the answer to any error."""
    if isinstance(error, RequestValidationError):
        error = _of_validation(error)
    elif isinstance(error, HTTPException) and not isinstance(error, ApiError):
        where = f"{request.method} {request.url.path}: "
        error = ApiError(error.status_code, where + str(error.detail))
    elif not isinstance(error, ApiError):
        error = FAILED
    return json_response(error.body, error.status_code)


def _of_validation(error: RequestValidationError) -> ApiError:
    """Return the first thing that is wrong with a request."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first['ctx']['error']}")
    place = [str(part) for part in first["loc"][1:]]  # behind "body"
    if not place:
        return ApiError(400, "the body has to be a JSON object, its Content-Type application/json")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "this server does not know it"
        if place[-1] in ONLY:
            message = f"this server has only {ONLY[place[-1]]!r}"
    return ApiError(400, f"{'.'.join(place)}: {message}", param=place[0])
