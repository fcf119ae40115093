"""The chat template turns a conversation into one text or into token ids.

Every turn stands between <s> and </s>, the pieces that mark documents in pretraining. The template
therefore adds no ids to the vocabulary.

    <s>system
    Be brief.</s>
    <s>user
    What is 1 + 1?</s>
    <s>assistant
    2</s>

Role, line end and content are encoded as one text. A "<s>" inside a content is not a marker.
"""

import json
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import jinja2
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lm.common.errors import UsageError
from lm.data.conversations import ASSISTANT, Turn, encode_conversation
from lm.data.tokenizer import MARKERS_FILE, Tokenizer

# A run folder has this file if its model was trained on conversations in this template.
TEMPLATE_FILE = "chat_template.jinja"
# llama.cpp without its Jinja interpreter recognises the template by the text
# "bos_token + message['role']" in it.
JINJA_TURN = "{{ bos_token + message['role'] + '\\n' + message['content'] + eos_token + '\\n' }}"
PLAIN_JINJA = (
    f"{{% for message in messages %}}{JINJA_TURN}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ bos_token + 'assistant\\n' }}{% endif %}"
)


def encode_chat_prompt(tokenizer: Tokenizer, turns: Iterable[Turn]) -> list[int]:
    """Return the ids of the turns and of the "<s>assistant" line that starts an answer; in an
    imported model's own template, if the tokenizer has one. Raises UsageError if that fails."""
    if tokenizer.chat_template:
        return tokenizer.chat_template.encode(turns)
    ids, _ = encode_conversation(tokenizer, turns)
    return [*ids, tokenizer.bos_id, *tokenizer.encode(f"{ASSISTANT}\n")]


class JinjaTemplate:
    """The chat template that an imported model has brought, for its tokenizer.json. The ids are
    those of transformers' `apply_chat_template`. The name of a marker in a message is a marker."""

    def __init__(self, source: str, tokenizer_json: str):
        self.source = source
        markers = json.loads(Path(tokenizer_json).with_name(MARKERS_FILE).read_text("utf-8"))
        # Each token is a text, or has a "content". Older imports have them in a dict of their own.
        tokens = markers.get("template_tokens", markers).items()
        self.tokens = {k: v["content"] if isinstance(v, dict) else v for k, v in tokens}
        self._tokenizer = tokenizers.Tokenizer.from_file(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._jinja = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        self._jinja.globals |= {"strftime_now": time.strftime, "raise_exception": _refuse}
        self._jinja.globals |= {"tools": None, "documents": None}  # some templates ask for them
        # Jinja's own filter escapes "<" and "&" for HTML.
        self._jinja.filters["tojson"] = partial(json.dumps, ensure_ascii=False)

    def encode(self, turns: Iterable[Turn]) -> list[int]:
        """Return the ids of the turns and of the start of an answer. Raises UsageError if the
        template cannot be used, or refuses the turns."""
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            template = self._jinja.from_string(self.source)
            text = template.render(messages=messages, add_generation_prompt=True, **self.tokens)
        except Exception as error:  # whatever a template's expressions raise
            said = " ".join(str(error).split())
            raise UsageError(f"the model's chat template: {said}") from error
        return self._tokenizer.encode(text, add_special_tokens=False).ids


class _Generation(Extension):
    """The tag {% generation %}, with which templates mark answers for training."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str):
    raise jinja2.TemplateError(message)
