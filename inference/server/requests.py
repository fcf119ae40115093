"""Bodies of requests, in OpenAI's form: https://platform.openai.com/docs/api-reference.

top_k, min_p and repetition_penalty are as in vLLM; their limits are in inference/sampling.py. A
field that is not known is refused, and so is a value that this server could only ignore.
"""

import random
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from data.chat_template import encode_chat_prompt
from data.conversations import USER, Turn, check_turns
from data.tokenizer import Tokenizer
from inference.prompts import require_text
from inference.sampling import Sampling

ONLY = {  # field: the only value that this server can give it
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "functions": [],
    "logit_bias": {},
    "logprobs": False,
    "n": 1,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "suffix": "",
    "tools": [],
}
WITHOUT_EFFECT = (  # on the answer of any server, or where there are no tools
    *("metadata", "name", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"),
    *("include_obfuscation", "service_tier", "store", "tool_choice", "user"),
)


def text_of_parts(content: Any) -> Any:
    """Return the text of [{"type": "text", "text": "…"}, …], or what is no list as it is."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("this model reads text alone")
    return "".join(texts)


def one_of_list(prompt: Any) -> Any:
    """Return the prompt of a list with one."""
    return prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt


def as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def is_idle(name: str, value: Any) -> bool:
    """Return whether a field asks for no more than what is done anyway."""
    only = ONLY.get(name)
    same = value == only and isinstance(value, bool) == isinstance(only, bool)  # 0 is not False
    return value is None or same or name in WITHOUT_EFFECT


class Form(BaseModel):
    """A JSON object. Null says the same as a field that is left out."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def without_idle_fields(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if not is_idle(name, value)}


class StreamOptions(Form):
    include_usage: bool = False


class Message(Form):
    role: str
    content: Annotated[str, BeforeValidator(text_of_parts)]


class Asked(Form):
    """The fields of both kinds of request."""

    prompt_field: ClassVar[str]  # the field that holds the prompt

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
    stop: Annotated[list[str], Field(max_length=4), BeforeValidator(as_list)] = []

    def sampling(self, default: Sampling) -> Sampling:
        """Return the settings, with a random seed unless one is given. Raises ValueError: see
        `Sampling`."""
        names = {field.name for field in fields(Sampling)}
        given = self.model_dump(include=names, exclude_none=True)
        return replace(default, **{"seed": random.getrandbits(62)} | given)


class ChatAsked(Asked):
    prompt_field = "messages"

    messages: list[Message] = Field(min_length=1)

    def encode(self, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """Return the prompt's ids, and the ids that may come next, [] for all.

        Raises ValueError: messages that are no conversation with a question at its end.
        """
        turns = [Turn(message.role, message.content) for message in self.messages]
        check_turns(turns, "messages")
        if turns[-1].role != USER:
            raise ValueError("messages: the last has to be the user's")
        return encode_chat_prompt(tokenizer, turns), []


class CompletionAsked(Asked):
    prompt_field = "prompt"

    prompt: Annotated[str, BeforeValidator(one_of_list)]

    def encode(self, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """Return the same of a text. Raises ValueError: it is empty, or no text."""
        return tokenizer.encode_prompt(require_text(self.prompt))
