"""Bodies of requests, in OpenAI's form: https://platform.openai.com/docs/api-reference.

top_k, min_p and repetition_penalty are as in vLLM; inference/sampling.py has the limits.
"""

import random
from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from data.chat_template import encode_chat_prompt
from data.conversations import USER, Turn, check_turns
from data.tokenizer import Tokenizer
from inference.prompts import require_text
from inference.sampling import Sampling

WITHOUT_EFFECT = (  # on the answer of any server, or where there are no tools
    *("metadata", "name", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"),
    *("include_obfuscation", "service_tier", "store", "tool_choice", "user"),
)


class Form(BaseModel):
    """A JSON object. Null says the same as a field that is left out; so does 0, false or nothing in
    a field that is not known."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def without_idle_fields(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        given = {k: v for k, v in body.items() if v is not None and k not in WITHOUT_EFFECT}
        return {key: value for key, value in given.items() if key in cls.model_fields or value}


class StreamOptions(Form):
    include_usage: bool = False


class TextPart(Form):
    type: Literal["text"]
    text: str


class Message(Form):
    role: str
    content: str | list[TextPart]

    def turn(self) -> Turn:
        parts = [self.content] if isinstance(self.content, str) else [p.text for p in self.content]
        return Turn(self.role, "".join(parts))


class Asked(Form):
    """The fields of both kinds of request."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] = []
    n: Literal[1] = 1

    def sampling(self, default: Sampling) -> Sampling:
        """Return the settings, with a random seed unless one is given. Raises ValueError."""
        names = {field.name for field in fields(Sampling)}
        given = self.model_dump(include=names, exclude_none=True)
        return replace(default, **{"seed": random.getrandbits(62)} | given)


class ChatAsked(Asked):
    messages: list[Message] = Field(min_length=1)

    def encode(self, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """Return the prompt's ids, and the ids that may come next, [] for all. Raises ValueError:
        messages that are no conversation with a question at its end."""
        turns = [message.turn() for message in self.messages]
        check_turns(turns, "messages")
        if turns[-1].role != USER:
            raise ValueError("messages: the last has to be the user's")
        return encode_chat_prompt(tokenizer, turns), []


class CompletionAsked(Asked):
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]

    def encode(self, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """Return the same of a text. Raises ValueError: it is empty, or no text."""
        return tokenizer.encode_prompt(require_text("".join(self.prompt)))
