"""Parts of a README that do not depend on its language: code, links, headings, tables."""

import re


def code_blocks(text: str) -> list[str]:
    """Return the fenced and the indented blocks of code, in order."""
    fenced = re.findall(r"^```.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    without = re.sub(r"^```.*?^```\n", "", text, flags=re.MULTILINE | re.DOTALL)
    return fenced + re.findall(r"(?:^    .*\n)+", without, re.MULTILINE)


def code_spans(text: str) -> list[str]:
    """Return what stands between backticks in running text, on one line each."""
    prose = re.sub(r"^```.*?^```\n", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


def links(text: str) -> list[str]:
    """Return where links and pictures lead."""
    return re.findall(r"\]\(([^)\s]+)\)", re.sub("`[^`]*`", "", text))


def rows(text: str) -> list[list[str]]:
    """Return the cells of every row of every table; a | inside a cell is not provided for."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def anchors(text: str) -> list[str]:
    """Return what #links to the headings are called, in order, as GitHub names them."""
    without_code = re.sub(r"^```.*?^```\n", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)", without_code, re.MULTILINE)
    return ["#" + re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def typed(text: str) -> list[str]:
    """Return what readers may type: code spans and lines of code, joined where they end in a
    backslash."""
    code = re.sub(r"\\\n\s*", " ", "".join(code_blocks(text)))
    return [line.strip() for line in [*code.splitlines(), *code_spans(text)]]


def flags_in(text: str) -> set[str]:
    """Return the flags that a text names."""
    return set(re.findall(r"(?<![\w-])--[a-z]\w*(?:-\w+)*", text))
