"""Bodies of requests, in OpenAI's form: https://platform.openai.com/docs/api-reference.

top_k, min_p and repetition_penalty are as in vLLM. A field that is not known is refused, and so is
a value that this server could only ignore. The limits of sampling are in inference/sampling.py.
"""

import random
from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from data.conversations import Turn
from inference.sampling import Sampling


def text_of_parts(content: Any) -> Any:
    """Return the text of [{"type": "text", "text": "…"}, …], or what is no list as it is."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("this model reads text alone")
    return "".join(texts)


def only_one(prompt: Any) -> Any:
    """Return the prompt of a list with one."""
    return prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt


def as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


NoDict = Annotated[dict, Field(max_length=0)]
NoList = Annotated[list, Field(max_length=0)]
Texts = Annotated[list[str], Field(max_length=4), BeforeValidator(as_list)]


class Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Form):
    include_usage: bool = False
    include_obfuscation: Any = None  # padding against eavesdroppers, of which there is none


class TextOnly(Form):
    type: Literal["text"] = "text"


class Message(Form):
    role: str
    content: Annotated[str, BeforeValidator(text_of_parts)]
    name: Any = None
    refusal: None = None


class Asked(Form):
    """The fields of both kinds of request. None is what the server does anyway."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Texts | None = None
    # What this server does in one way only.
    n: Literal[1] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: NoDict | None = None
    # What changes nothing about the answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens

    def sampling(self, default: Sampling) -> Sampling:
        """Return the settings, with a random seed unless one is given. Raises ValueError: see
        `Sampling`."""
        names = [field.name for field in fields(Sampling)]
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(default, **{"seed": random.getrandbits(62)} | given)


class ChatAsked(Asked):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: Literal[False] | None = None
    tools: NoList | None = None
    functions: NoList | None = None
    response_format: TextOnly | None = None
    tool_choice: Any = None  # of no tools
    parallel_tool_calls: Any = None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def turns(self) -> list[Turn]:
        return [Turn(message.role, message.content) for message in self.messages]


class CompletionAsked(Asked):
    prompt: Annotated[str, BeforeValidator(only_one)]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: Literal[""] | None = None
