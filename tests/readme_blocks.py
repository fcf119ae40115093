"""The parts of a README that are the same in every language: its blocks, code, numbers, links."""

import re
from dataclasses import dataclass
from decimal import Decimal


@dataclass
class Block:
    """A piece of Markdown; `kind` is one of the words in `kind_of`, `line` counts from 1."""

    kind: str
    line: int
    text: str


def blocks(text: str) -> list[Block]:
    """The blocks of a README in order; lines of one paragraph or list item are joined by spaces."""
    found, fenced, after_gap = [], False, True
    for number, line in enumerate(text.splitlines(), 1):
        kind = "code block" if fenced else kind_of(line)
        if not line.strip() and not fenced:
            after_gap = True
            continue
        if line.startswith("```"):
            fenced = not fenced
            if fenced:
                found.append(Block("code block", number, ""))
        elif fenced or (found and not after_gap and kind == found[-1].kind != "list item"):
            joint = " " if kind == "paragraph" else "\n"
            found[-1].text += joint + (line if fenced else line.strip())
        elif found and not after_gap and kind == "paragraph" and found[-1].kind == "list item":
            found[-1].text += " " + line.strip()
        else:
            found.append(Block(kind, number, line.strip()))
        after_gap = False
    if fenced:
        raise ValueError(f"the ``` in line {found[-1].line} is never closed")
    return found


def kind_of(line: str) -> str:
    starts = {
        **{"#": "heading", "    ": "code block", "- ": "list item"},
        **{"|": "table", "![": "picture", "<!--": "comment"},
    }
    return next((kind for start, kind in starts.items() if line.startswith(start)), "paragraph")


def sections(text: str) -> list[list[Block]]:
    """The blocks of a README, cut before every heading."""
    found = []
    for block in blocks(text):
        if block.kind == "heading" or not found:
            found.append([])
        found[-1].append(block)
    return found


def level(heading: Block) -> int:
    return len(re.match("#*", heading.text)[0])


def code_spans(text: str) -> list[str]:
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", re.sub("`[^`]*`", "", text))


def figures(text: str) -> list[str]:
    """Numbers outside code and links, with the name they are part of: '8.76', 'ZeRO-2', 'fp32'.

    Numbers with a word for their size are written out: '361000000' for 361 million and 3.61 亿.
    """
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text)
    number = r"([A-Za-z_]+-?)?(\d+(?:[.,]\d+)*(?:e-?\d+)?)(?: ?(million|万|亿))?"
    sizes = {"million": 10**6, "万": 10**4, "亿": 10**8}
    return [
        f"{(Decimal(digits) * sizes[size]).normalize():f}" if size else name + digits
        for name, digits, size in re.findall(number, prose)
    ]


def rows(table: str) -> list[list[str]]:
    """The cells of every row; a | inside a cell is not provided for."""
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]


def anchors(text: str) -> list[str]:
    """What #links to the headings are called, in order, as GitHub names them."""
    titles = [block.text.lstrip("# ") for block in blocks(text) if block.kind == "heading"]
    return ["#" + re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def typed(text: str) -> list[str]:
    """All that readers may type: code spans, and the lines of code blocks, joined where they end
    in a backslash."""
    found = []
    for block in blocks(text):
        if block.kind == "code block":
            found += re.sub(r"\\\n\s*", " ", block.text).splitlines()
        else:
            found += code_spans(block.text)
    return [line.strip() for line in found]


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z]\w*(?:-\w+)*", text))
