"""Read a JSON file object by object: one per line, the elements of one array, or objects that span
lines. Memory holds one line or object."""

import codecs
import io
import json
import re
from collections.abc import Iterator
from functools import partial

from lm.common.errors import UsageError

CHUNK_BYTES = 1 << 17
# Without a limit, a bracket or quote that is never closed would read a whole file into memory.
LONGEST = 1 << 26  # bytes of a line, or characters of another object or of a field in a .csv
BETWEEN = re.compile(r"[\s,]*")  # characters between two objects


def json_objects(path: str, file: io.BufferedReader) -> Iterator[tuple[str, bytes]]:
    """Yield place and content of each object, and of each line or element that is no object.
    Raises UsageError if objects that are not lines cannot be told apart, or one is too long."""
    if file.peek(1).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from _elements(path, file, b"")
        return
    is_first = True
    for number, line in enumerate(iter(partial(file.readline, LONGEST), b""), 1):
        place = f"{path}, line {number}"
        if len(line) == LONGEST:
            raise UsageError(f"{place}: longer than {LONGEST:,} bytes")
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if is_first and _is_begun(line):
            yield from _elements(path, file, line)
            return
        if line.strip():
            is_first = False
            yield place, line


def _is_begun(line: bytes) -> bool:
    """Return True if a line holds the valid beginning of an object that goes on."""
    text = line.decode(errors="replace").rstrip()
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return 0 < len(text) <= error.pos
    except (ValueError, RecursionError):
        pass
    return False


def _elements(path: str, file: io.BufferedReader, begun: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the elements of an array, or objects that follow one another."""
    # Invalid UTF-8 is kept, so that `corpus.decode` can report it.
    decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
    parse = json.JSONDecoder().raw_decode
    text = decode(begun + file.read(CHUNK_BYTES)).lstrip()
    is_array = text.startswith("[")
    at, number, unit = int(is_array), 1, "element" if is_array else "object"
    while True:
        at, place = BETWEEN.match(text, at).end(), f"{path}, {unit} {number}"
        if is_array and text.startswith("]", at):
            break
        try:
            _, end = parse(text, at)
        except (ValueError, RecursionError) as error:  # perhaps the object is not yet read whole
            block = file.read(max(CHUNK_BYTES, len(text) - at)) if len(text) - at < LONGEST else b""
            if not block and at == len(text) and not is_array:
                return
            if not block:
                problem = f"not a whole JSON object ({getattr(error, 'msg', error)})"
                limit = f"or it has more than {LONGEST:,} characters"
                raise UsageError(f"{place}: {problem}, {limit}") from error
            text, at = text[at:] + decode(block), 0
            continue
        yield place, text[at:end].encode(errors="surrogateescape")
        number, at = number + 1, end
    if (text[at + 1 :] + decode(file.read(CHUNK_BYTES))).strip():
        raise UsageError(f"{path}: there is more after the end of the array: one array per file")
