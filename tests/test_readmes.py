"""README.md and README_zh.md say the same, and what they tell people to type exists.

Words are free, a paragraph may be told in another way. What a reader types or compares is not:
code, numbers, tables, links. So whoever changes one README is told where to change the other.
"""

import contextlib
import importlib
import importlib.util
import io
import re
from collections import Counter
from functools import cache

import pytest
from conftest import REPOSITORY
from flag_table import flag_table
from readme_blocks import (
    Block,
    anchors,
    blocks,
    code_spans,
    figures,
    flags_in,
    level,
    links,
    rows,
    sections,
    typed,
)

from common.parser import DEEPSPEED_LAUNCHER_FLAGS, LAUNCHER_FLAGS

ENGLISH, CHINESE = "README.md", "README_zh.md"
TEXTS = {name: (REPOSITORY / name).read_text(encoding="utf-8") for name in (ENGLISH, CHINESE)}
# tensorboard's, pip's, pytest's (tests/conftest.py) and torchrun's; and `--no-`, which switches
# flags off.
OTHER_FLAGS = {"--logdir", "--no-deps", "--all", "--no", "--nproc_per_node"}
HAN = r"[\u4e00-\u9fff]"


def differences(english: str, chinese: str) -> list[str]:
    """What one README says and the other does not, a line each, for whoever edits one of them."""
    ours, theirs = sections(english), sections(chinese)
    levels = [[level(section[0]) for section in side] for side in (ours, theirs)]
    if levels[0] != levels[1]:
        return [f"levels of headings: {ENGLISH} has {levels[0]}, {CHINESE} {levels[1]}"]
    found = []
    for one, other in zip(ours, theirs, strict=True):
        kinds = [[block.kind for block in section] for section in (one, other)]
        if kinds[0] != kinds[1]:
            more, fewer = Counter(kinds[0]), Counter(kinds[1])
            what = f"{ENGLISH} alone {dict(more - fewer)}, {CHINESE} alone {dict(fewer - more)}"
            if more == fewer:
                what = f"in another order, {kinds[0]} and {kinds[1]}"
            found.append(f"{place(one[0], other[0])}, the section's blocks: {what}")
            continue
        for a, b in zip(one, other, strict=True):
            what = [*block_differences(a, b), *link_differences(a, b, english, chinese)]
            found += [f"{place(a, b)}, {line}" for line in what]
    return found


def place(english: Block, chinese: Block) -> str:
    return f"{ENGLISH}:{english.line} and {CHINESE}:{chinese.line}"


def block_differences(english: Block, chinese: Block) -> list[str]:
    """What differs in two blocks of the same kind, apart from words and links."""
    if english.kind in ("code block", "comment"):
        return [] if english.text == chinese.text else [f"{english.kind}: copy one to the other"]
    if english.kind != "table":
        return text_differences(english.text, chinese.text)
    ours, theirs = rows(english.text), rows(chinese.text)
    if len(ours) != len(theirs):
        return [
            f"table: {len(ours)} rows and {len(theirs)}",
            *text_differences(english.text, chinese.text),
        ]
    found = []
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if len(one) != len(other):
            found.append(f"line {number} of the table: {len(one)} columns and {len(other)}")
        elif number == 1 and one != other:
            found.append(f"the line under the table's head: {one} and {other}")
        for a, b in zip(one, other, strict=False):
            found += [f"line {number} of the table, {what}" for what in text_differences(a, b)]
    return found


def text_differences(english: str, chinese: str) -> list[str]:
    """Code and numbers that one text has alone. Their order and repetition are the language's."""
    found = []
    for what, of in (("code", code_spans), ("numbers", figures)):
        ours, theirs = {*of(english)}, {*of(chinese)}
        if ours != theirs:
            alone = f"{ENGLISH} alone {sorted(ours - theirs)}, {CHINESE} {sorted(theirs - ours)}"
            found.append(f"{what}: {alone}")
    return found


def link_differences(a: Block, b: Block, english: str, chinese: str) -> list[str]:
    """Links that lead elsewhere; #names of sections differ, their places among the headings don't.

    Raises:
        ValueError: a link to a section that does not exist.
    """

    def lead_to(block: Block, text: str) -> list:
        others = {ENGLISH: "the other README", CHINESE: "the other README"}
        return [
            anchors(text).index(link) if link.startswith("#") else others.get(link, link)
            for link in links(block.text)
        ]

    if lead_to(a, english) == lead_to(b, chinese):
        return []
    return [f"links: to {links(a.text)} and to {links(b.text)}"]


def test_both_readmes_say_the_same():
    found = differences(TEXTS[ENGLISH], TEXTS[CHINESE])
    assert not found, "what changes in one README has to change in the other:\n" + "\n".join(found)


CHANGES = [
    ("the level of a heading", "## 速度", "### 速度", "levels of headings"),
    ("a section left out", "## 速度\n", "", "levels of headings"),
    ("a paragraph more", "## 速度\n", "## 速度\n\n快。\n", "README_zh.md alone {'paragraph': 1}"),
    ("a list item more", "- 每一种", "- 快。\n- 每一种", "README_zh.md alone {'list item': 1}"),
    ("another order", "<!-- flags -->\n**数据", "**数\n\n<!-- flags -->", "in another order"),
    ("a command", "DATA=my.jsonl bash run", "DATA=my.json bash run", "code block: copy"),
    ("output", "loss 2.7658", "loss 2.7659", "code block: copy"),
    ("a flag in the prose", "`--greedy`", "`--greed`", "['--greedy'], README_zh.md ['--greed']"),
    ("a flag left out", "、`--greedy`", "", "alone ['--greedy'], README_zh.md []"),
    ("a number", "ln(6400) = 8.76", "ln(6400) = 8.67", "alone ['8.76'], README_zh.md ['8.67']"),
    ("a number of parameters", "2580 万", "258 万", "['25800000'], README_zh.md ['2580000']"),
    ("a stage of ZeRO", "DDP 和 ZeRO-1", "DDP 和 ZeRO-3", "['ZeRO-1'], README_zh.md ['ZeRO-3']"),
    ("a row left out", "| `--epochs` | `1` | 数据过几遍 |\n", "", "alone ['--epochs']"),
    ("a row more", "| `DATA` |", "| `X` | |\n| `DATA` |", "10 rows and 11"),
    ("a column more", "| `DATA` |", "| `DATA` | |", "2 columns and 3"),
    ("an alignment", "|---|---|\n| `weights", "|---|:-:|\n| `weights", "under the table's head"),
    ("a cell's code in another cell", "| `--beta2` | `0.95` |", "| | `--beta2` `0.95` |", "code:"),
    ("a default", "| `--beta2` | `0.95`", "| `--beta2` | `0.9`", "['0.95'], README_zh.md ['0.9']"),
    ("a number in a table", "最多 2000", "最多 200", "alone ['2000'], README_zh.md ['200']"),
    ("a link", "](docs/lab-log.md)", "](docs/reliability.md)", "links: to"),
    ("a link to a section", "](#自己启动)", "](#速度)", "links: to"),
    ("the picture", "](docs/pictures/loss.png)", "](docs/pictures/other.png)", "links: to"),
    ("the comment at the flags", "<!-- /flags -->", "<!-- flags end -->", "comment: copy"),
]


@pytest.mark.parametrize(("what", "old", "new", "message"), CHANGES, ids=[c[0] for c in CHANGES])
def test_a_change_in_one_readme_alone_is_found_and_named(what, old, new, message):
    assert old in TEXTS[CHINESE], f"{CHINESE} has no {old!r} any more: change {what} elsewhere"
    found = differences(TEXTS[ENGLISH], TEXTS[CHINESE].replace(old, new, 1))
    assert message in "\n".join(found)


def test_the_same_in_other_words_is_no_difference():
    assert differences("# 361 million in two hours", "# 3.61 亿，两小时") == []
    assert differences("# A\n\n`a`, then\n`b`: 25.8 million", "# 甲\n\n`b` 与 `a`：2580 万") == []


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_and_picture_leads_to_something_that_exists(name):
    targets = links(TEXTS[name])
    assert "docs/pictures/loss.png" in targets
    names = anchors(TEXTS[name])
    local = [target for target in targets if not target.startswith("https://")]
    missing = [x for x in local if x not in names and not (REPOSITORY / x).is_file()]
    assert missing == [], f"{name} links to what does not exist"


@pytest.mark.parametrize(("name", "other"), [(ENGLISH, CHINESE), (CHINESE, ENGLISH)])
def test_each_readme_links_to_the_other_under_its_title(name, other):
    assert links(blocks(TEXTS[name])[1].text) == [other]


def flag_rows(text: str) -> list[list[str]]:
    """[flag, default, meaning] of every flag in tables of flags."""
    tables = [rows(block.text) for block in blocks(text) if block.kind == "table"]
    return [row for table in tables for row in table if row[0].startswith("`--") and len(row) == 3]


def test_the_chinese_table_has_the_flags_defaults_and_choices_of_the_parser():
    # That README.md's is the generated one to the letter stands in test_arguments.py.
    generated, chinese = flag_rows(flag_table()), flag_rows(TEXTS[CHINESE])
    fix = f"compare {CHINESE} with what `python tests/flag_table.py` prints"
    assert [row[:2] for row in chinese] == [row[:2] for row in generated], fix
    for (flag, _, meaning), (_, _, translated) in zip(generated, chinese, strict=True):
        choices = re.search(r": (\w+(, \w+)+)$", meaning)
        assert not choices or translated.endswith(choices[1]), f"{flag} takes {choices[1]}: {fix}"
        assert re.search(HAN, translated), f"{CHINESE}: {flag} is not explained in Chinese"


def module_commands(text: str) -> list[tuple[str, set[str]]]:
    """(module, flags after it) of every `-m MODULE` of this project, and of its name by itself."""
    ours = r"(?:.* -m |)((?:scripts|benchmarks|training)\.\w+)(?!\w)(.*)"
    matches = [re.fullmatch(ours, line) for line in typed(text)]
    return [(m[1], flags_in(m[2])) for m in matches if m and m[1] != "scripts.NAME"]


@cache
def flags_of(module: str) -> set[str]:
    """The flags in what `python -m module --help` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        importlib.import_module(module).main(["--help"])
    return flags_in(out.getvalue())


@pytest.mark.parametrize("name", TEXTS)
def test_every_module_that_a_command_names_exists(name):
    modules = {module for module, _ in module_commands(TEXTS[name])}
    assert {"scripts.generate", "scripts.evaluate", "benchmarks.data"} <= modules
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    assert missing == [], f"{name} names modules that do not exist"


@pytest.mark.parametrize("name", TEXTS)
def test_every_module_takes_the_flags_that_stand_after_it(name):
    commands = module_commands(TEXTS[name])
    assert ("scripts.generate", {"--prompt"}) in commands
    for module, flags in commands:
        unknown = flags - flags_of(module) if flags else set()
        assert not unknown, f"{name}: {module} has no {', '.join(sorted(unknown))}"


@pytest.mark.parametrize("name", TEXTS)
def test_every_flag_that_is_named_is_a_flag_of_something(name):
    modules = {module for module, _ in module_commands(TEXTS[name])} - {"training.arguments"}
    known = {*LAUNCHER_FLAGS, *DEEPSPEED_LAUNCHER_FLAGS, *OTHER_FLAGS}
    for program in ("pretrain", "sft", "distillation", "several"):
        known |= flags_of(f"train_{program}_accelerate")
    known = known.union(*map(flags_of, modules))
    named = flags_in("\n".join(typed(TEXTS[name])))
    assert {"--beyond_context", "--use_deepspeed", "--no-use_flash_attn"} <= named
    assert named <= known, f"{name} names what is no flag: {sorted(named - known)}"


def test_beside_the_flags_of_others_stand_flags_that_exist():
    text = (REPOSITORY / "docs/coming-from.md").read_text(encoding="utf-8")
    tables = [rows(block.text) for block in blocks(text) if block.kind == "table"]
    training, generating = ({*flags_in("".join(row[0] for row in table))} for table in tables)
    assert {"--dim", "--max_seq_len"} <= training <= flags_of("train_pretrain_accelerate")
    assert {"--prompt"} <= generating <= flags_of("scripts.generate")


def test_a_module_or_flag_that_does_not_exist_would_be_found():
    text = (
        "`python -m scripts.generat auto --promt x`\n\n    python -m scripts.report \\\n      --pic"
    )
    commands = [("scripts.generat", {"--promt"}), ("scripts.report", {"--pic"})]
    assert module_commands(text) == commands
    assert importlib.util.find_spec("scripts.generat") is None
    assert "--picture" in flags_of("scripts.report")
    assert "--pic" not in flags_of("scripts.report")


def typography(text: str) -> list[str]:
    """Where Chinese text breaks the rules of its page, each with its line."""
    found = []
    for block in blocks(text):
        if block.kind == "code block":
            continue
        words = re.sub(r"\]\([^)]*\)", "]", block.text)
        for rule, pattern in (
            ("a space between Chinese and Latin or code", rf"{HAN}[A-Za-z0-9`]|[A-Za-z0-9`%]{HAN}"),
            ("full-width punctuation after Chinese", rf"{HAN}[,.;:!?()]"),
        ):
            found += [f"{CHINESE}:{block.line}: {rule}: {x}" for x in re.findall(pattern, words)]
        # A browser shows a line break between two Chinese characters as a gap.
        if block.kind != "table" and block.text not in map(str.strip, text.splitlines()):
            found.append(f"{CHINESE}:{block.line}: a paragraph on one line")
    return found


def test_the_chinese_keeps_to_the_rules_of_chinese_typesetting():
    assert typography(TEXTS[CHINESE]) == []


@pytest.mark.parametrize("text", ["用GPU", "`a`的", "95%的", "好,", "参数\n很多", "模型。\n模型"])
def test_breaking_the_rules_of_chinese_typesetting_is_found(text):
    assert len(typography(text)) == 1
