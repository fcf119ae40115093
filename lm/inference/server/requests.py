"""Request bodies of OpenAI's API: https://platform.openai.com/docs/api-reference.

The fields top_k, min_p and repetition_penalty are vLLM's. lm/inference/sampling.py has the limits.
"""

import random
from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lm.data.chat_template import encode_chat_prompt
from lm.data.conversations import USER, Turn, check_turns, text_of
from lm.data.tokenizer import Tokenizer
from lm.inference.prompts import require_text
from lm.inference.sampling import Sampling

# Ignored fields: they do not change an answer, or only if the request has tools (refused).
WITHOUT_EFFECT = (  # noqa: SIM905
    "function_call include_obfuscation metadata name parallel_tool_calls prediction "
    "prompt_cache_key prompt_cache_retention safety_identifier service_tier store tool_choice user"
).split()
# Values that ask for what this server does anyway; with another value, the field is refused.
WITHOUT_CHANGE = {
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "best_of": 1,
    "reasoning_effort": "none",
    "verbosity": "medium",
}


class Form(BaseModel):
    """A JSON object. Fields that are null, and unknown fields that are 0, false, empty or in
    WITHOUT_CHANGE, are ignored."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def without_ignored_fields(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        given = {k: v for k, v in body.items() if v is not None and k not in WITHOUT_EFFECT}
        idle = {k for k, v in given.items() if not v or v == WITHOUT_CHANGE.get(k)}
        return {k: v for k, v in given.items() if k in cls.model_fields or k not in idle}


class StreamOptions(Form):
    include_usage: bool = False


class Message(Form):
    role: str
    content: Any


class GenerationRequest(Form):
    """The fields that chat and completion requests share."""

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
    seed: int = Field(default_factory=lambda: random.getrandbits(62))
    stop: str | Annotated[list[str], Field(max_length=4)] = []
    n: Literal[1] = 1

    def sampling(self, default: Sampling) -> Sampling:
        """Return the sampling settings of this request. Raises ValueError if a value is out of its
        limits."""
        names = {field.name for field in fields(Sampling)}
        return replace(default, **self.model_dump(include=names, exclude_none=True))


class ChatRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1)

    def encode(self, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """Return the ids of the prompt, and [], because every token may follow. Raises ValueError
        if the messages are not a conversation that ends with a question."""
        # OpenAI's newer name of the role "system" is "developer".
        roles = ["system" if m.role == "developer" else m.role for m in self.messages]
        contents = [text_of(message.content) for message in self.messages]
        turns = list(map(Turn, roles, contents))
        check_turns(turns, "messages")
        if turns[-1].role != USER:
            raise ValueError("messages: the last message must have the role user")
        return encode_chat_prompt(tokenizer, turns), []


class CompletionRequest(GenerationRequest):
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]

    def encode(self, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """Return the ids of the prompt, and the ids that may come next ([]: all). Raises ValueError
        if the prompt is empty, or not valid text."""
        return tokenizer.encode_prompt(require_text("".join(self.prompt)))
