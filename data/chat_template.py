"""The chat template: every turn between the begin and the end piece that mark documents in
pretraining, so that it takes no ids of its own.

    <s>system
    Be brief.</s>
    <s>user
    What is 1 + 1?</s>
    <s>assistant
    2</s>

Role, line end and content are one text. Text is never read as a marker.
"""

from collections.abc import Iterable
from itertools import takewhile

from data.conversations import ASSISTANT, Turn
from data.tokenizer import Tokenizer

# Lies beside weights that have learned to answer in this template.
TEMPLATE_FILE = "chat_template.jinja"
# transformers looks for markers in a user's words too. So JINJA puts these noncharacters behind
# every "<", and the exported tokenizer removes them. Where the text has both, two more between
# them preserve it.
ESCAPE = "\ufdd0\ufdd1"
_JINJA = (
    "{{% for message in messages %}}"
    "{{{{ bos_token + {text} + eos_token + '\\n' }}}}"
    "{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ bos_token + 'assistant\\n' }}}}{{% endif %}}"
)
_TEXT = "message['role'] + '\\n' + message['content']"
# For others. llama.cpp without Jinja knows it by "bos_token + message['role']".
PLAIN_JINJA = _JINJA.format(text=_TEXT)
# For transformers, with a tokenizer from `formats.tokenizer_json.convert(..., chat=True)`.
JINJA = _JINJA.format(
    text=f"({_TEXT}) | replace('{ESCAPE}', '{ESCAPE[0]}{ESCAPE}{ESCAPE[1]}')"
    f" | replace('<', '<{ESCAPE}')"
)


def encode_conversation(
    tokenizer: Tokenizer, turns: Iterable[Turn]
) -> tuple[list[int], list[bool]]:
    """Return the ids of the turns, and for each whether it counts in the loss: an answer and its
    end piece do."""
    turns, ids, counts = list(turns), [], []
    texts = [f"{ASSISTANT}\n", "\n", *(f"{role}\n{content}" for role, content, _ in turns)]
    prompt, line_end, *encoded = tokenizer.encode_batch(texts)
    for turn, text in zip(turns, encoded, strict=True):
        # A piece may hold the line end and text behind it.
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(text, prompt, strict=False))
        said = len(text) - len(list(shared)) + 1 if turn.counts else 0
        ids += [tokenizer.bos_id, *text, tokenizer.eos_id, *line_end]
        counts += [False] * (len(text) + 2 - said) + [True] * said + [False] * len(line_end)
    return ids, counts


def encode_chat_prompt(tokenizer: Tokenizer, turns: Iterable[Turn]) -> list[int]:
    """Return the ids of the turns and of the beginning of the assistant's next one."""
    ids, _ = encode_conversation(tokenizer, turns)
    return [*ids, tokenizer.bos_id, *tokenizer.encode(f"{ASSISTANT}\n")]
