"""What is answered, in OpenAI's form: whole, in pieces, or that it cannot be done."""

import json
import time
import uuid
from dataclasses import dataclass, field

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from inference.continuation import Continuation


def as_json(value: dict) -> bytes:
    """Half a character, as a request may hold one, stays the escape that it was written as."""
    return json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace")


def json_response(value: dict, status: int = 200) -> Response:
    return Response(as_json(value), status, media_type="application/json")


def event(data: bytes) -> bytes:
    """One of server-sent events."""
    return b"data: " + data + b"\n\n"


@dataclass
class Reply:
    """
    Args:
        chat: whether it is an answer in a conversation.
        model: the model's name.
    """

    chat: bool
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self):
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"

    def _object(self, kind: str, choices: list[dict], **more) -> dict:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head | {"choices": choices} | more

    def whole(self, written: str, text: Continuation) -> dict:
        message = {"role": "assistant", "content": written, "refusal": None}
        choice = {"message": message} if self.chat else {"text": written}
        choice |= {"index": 0, "logprobs": None, "finish_reason": text.finish_reason}
        kind = "chat.completion" if self.chat else "text_completion"
        return self._object(kind, [choice], usage=usage(text))

    def chunk(self, finish_reason: str | None = None, **delta: str) -> dict:
        """A piece of an answer: `content`, at the beginning the `role` as well."""
        choice = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        choice |= {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        return self._object(self._kind_of_chunk, [choice])

    def usage_chunk(self, text: Continuation) -> dict:
        return self._object(self._kind_of_chunk, [], usage=usage(text))

    @property
    def _kind_of_chunk(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"


def usage(text: Continuation) -> dict[str, int]:
    read, written = len(text.prompt), text.n_tokens
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
    }


class ApiError(HTTPException):
    """What cannot be done, and why.

    Args:
        status: HTTP's.
        param: the name in the request that is to blame.
        code: for programs.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ):
        super().__init__(status, message)
        self.param, self.code = param, code

    @property
    def body(self) -> dict:
        kinds = {429: "rate_limit_error"} | dict.fromkeys((500, 503), "server_error")
        kind = kinds.get(self.status_code, "invalid_request_error")
        about = {"type": kind, "param": self.param, "code": self.code}
        return {"error": {"message": self.detail} | about}


FAILED = ApiError(500, "the server could not write this; what it was told stands in its terminal")


async def in_openai_form(request: Request, error: Exception) -> Response:
    """The answer to any error."""
    if isinstance(error, RequestValidationError):
        error = of_validation(error)
    elif isinstance(error, HTTPException) and not isinstance(error, ApiError):
        where = f"{request.method} {request.url.path}: "
        error = ApiError(error.status_code, where + str(error.detail))
    elif not isinstance(error, ApiError):
        error = FAILED
    return json_response(error.body, error.status_code)


def of_validation(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a request."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first['ctx']['error']}")
    place = [str(part) for part in first["loc"][1:]]  # behind "body"
    if not place:
        return ApiError(400, "the body has to be a JSON object, its Content-Type application/json")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "this server does not know it"
    return ApiError(400, f"{'.'.join(place)}: {message}", param=place[0])
