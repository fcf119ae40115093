"""README.md and README_zh.md tell people to type the same commands, and all of them exist."""

import contextlib
import importlib
import importlib.util
import io
import re
from functools import cache

import pytest
from conftest import REPOSITORY
from flag_table import flag_table

ENGLISH, CHINESE = "README.md", "README_zh.md"
TEXTS = {name: (REPOSITORY / name).read_text(encoding="utf-8") for name in (ENGLISH, CHINESE)}
LAUNCHER_FLAGS = (
    *("--num_processes", "--mixed_precision", "--main_process_port", "--config_file"),
    *("--multi_gpu", "--use_deepspeed", "--deepspeed_config_file", "--cpu"),
    *("--num_machines", "--machine_rank", "--main_process_ip"),
    *("--num_gpus", "--num_nodes", "--hostfile", "--include", "--exclude", "--no_local_rank"),
    *("--master_addr", "--master_port", "--node_rank", "--no_ssh"),
)
# Of tensorboard, pip, pytest and torchrun; and `--no-`, which switches flags off.
OTHER_FLAGS = {"--logdir", "--no-deps", "--all", "--no", "--nproc_per_node"}
HAN = r"[\u4e00-\u9fff]"


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


def test_both_readmes_have_the_same_commands_output_and_code():
    assert code_blocks(TEXTS[CHINESE]) == code_blocks(TEXTS[ENGLISH])
    ours, theirs = ({*code_spans(TEXTS[name])} for name in (ENGLISH, CHINESE))
    assert sorted(ours ^ theirs) == []


def test_both_readmes_have_the_same_numbers_in_their_tables():
    def numbers(name: str) -> list[str]:
        cells = [cell for row in rows(TEXTS[name]) for cell in row]
        plain = [
            re.sub(r"`[^`]*`|\]\([^)]*\)| |[\d.]+ ?(million|万|亿)", "", cell) for cell in cells
        ]
        return sorted(number for cell in plain for number in re.findall(r"\d+\.\d+", cell))

    assert numbers(CHINESE) == numbers(ENGLISH)


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_and_picture_leads_to_something_that_exists(name):
    targets, names = links(TEXTS[name]), anchors(TEXTS[name])
    assert "docs/pictures/loss.png" in targets
    local = [target for target in targets if not target.startswith("https://")]
    missing = [x for x in local if x not in names and not (REPOSITORY / x).is_file()]
    assert missing == [], f"{name} links to what does not exist"


def test_the_flag_tables_are_those_of_the_parser():
    assert flag_table() in TEXTS[ENGLISH], "python tests/flag_table.py prints the tables"
    generated, chinese = (
        [row for row in rows(text) if row[0].startswith("`--") and len(row) == 3]
        for text in (flag_table(), TEXTS[CHINESE])
    )
    assert [row[:2] for row in chinese] == [row[:2] for row in generated]
    for (flag, _, meaning), (_, _, translated) in zip(generated, chinese, strict=True):
        choices = re.search(r": (\w+(, \w+)+)$", meaning)
        assert not choices or translated.endswith(choices[1]), f"{flag} takes {choices[1]}"
        assert re.search(HAN, translated), f"{flag} is not explained in Chinese"


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
def test_every_module_exists_and_takes_the_flags_that_stand_after_it(name):
    commands = module_commands(TEXTS[name])
    assert ("scripts.generate", {"--prompt"}) in commands
    for module, flags in commands:
        assert importlib.util.find_spec(module), f"{name} names {module}, which does not exist"
        unknown = flags - flags_of(module) if flags else set()
        assert not unknown, f"{name}: {module} has no {', '.join(sorted(unknown))}"


@pytest.mark.parametrize("name", TEXTS)
def test_every_flag_that_is_named_is_a_flag_of_something(name):
    modules = {module for module, _ in module_commands(TEXTS[name])} - {"training.arguments"}
    known = {*LAUNCHER_FLAGS, *OTHER_FLAGS}
    for program in ("pretrain", "sft", "distillation", "several"):
        known |= flags_of(f"train_{program}_accelerate")
    known = known.union(*map(flags_of, modules))
    named = flags_in("\n".join(typed(TEXTS[name])))
    assert {"--beyond_context", "--use_deepspeed", "--no-use_flash_attn"} <= named
    assert named <= known, f"{name} names what is no flag: {sorted(named - known)}"


def test_beside_the_flags_of_others_stand_flags_that_exist():
    text = (REPOSITORY / "docs/coming-from.md").read_text(encoding="utf-8")
    ours = {flag for row in rows(text) for flag in flags_in(row[0])}
    assert {"--dim", "--prompt"} <= ours
    assert ours <= flags_of("train_pretrain_accelerate") | flags_of("scripts.generate")
