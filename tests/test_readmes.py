"""The READMEs and docs name only commands, flags, files and tests that exist."""

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
DOCS = sorted(f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md"))
TEXTS = {
    name: (REPOSITORY / name).read_text(encoding="utf-8") for name in (ENGLISH, CHINESE, *DOCS)
}
# Flags of launchers, pip, shell scripts, SLURM; `--no` is from the prefix `--no-` in docs/flags.md.
OTHER_FLAGS = {
    *("--num_processes", "--mixed_precision", "--main_process_port", "--config_file"),
    *("--multi_gpu", "--use_deepspeed", "--deepspeed_config_file", "--cpu"),
    *("--num_machines", "--machine_rank", "--main_process_ip"),
    *("--num_gpus", "--hostfile", "--master_addr", "--master_port", "--node_rank", "--no_ssh"),
    *("--no-deps", "--all", "--tiny", "--no", "--nproc_per_node", "--signal", "--depth"),
    *("--nodes", "--ntasks-per-node", "--gpus-per-node"),  # SLURM
}
FENCED = re.compile(r"^```.*?\n(.*?)^```\n?", re.MULTILINE | re.DOTALL)
HAN = r"[\u4e00-\u9fff]"
TRANSLATED = ("docs/data", "docs/reading")  # pages that also exist in Chinese, as NAME_zh.md
MIRRORS = ("pypi.tuna.tsinghua.edu.cn", "hf-mirror.com", "modelscope")  # only for Chinese readers
# Pages that name flags of other programs or of programs that were deleted.
FOREIGN = ("docs/coming-from.md", "docs/lab-log.md")


def code_blocks(text: str) -> list[str]:
    """Return the fenced blocks of code, then the indented blocks."""
    indented = re.findall(r"(?:^    .*\n)+", FENCED.sub("", text), re.MULTILINE)
    return FENCED.findall(text) + indented


def links(text: str) -> list[str]:
    """Return where links and pictures lead."""
    return re.findall(r"\]\(([^)\s]+)\)", re.sub("`[^`]*`", "", text))


def rows(text: str) -> list[list[str]]:
    """Return the cells of every row of every table. No cell may contain a |."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def anchors(text: str) -> list[str]:
    """Return the anchors of the headings, in order, as GitHub names them."""
    titles = re.findall(r"^#+ (.*)", FENCED.sub("", text), re.MULTILINE)
    return ["#" + re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def typed(text: str) -> list[str]:
    """Return the lines of code, joined where they end in a backslash, and the code spans."""
    code = re.sub(r"\\\n\s*", " ", "".join(code_blocks(text)))
    spans = re.findall(r"`([^`]+)`", FENCED.sub("", text))
    return [" ".join(line.split()) for line in [*code.splitlines(), *spans]]


def commands(text: str) -> set[str]:
    """Return the commands to type, without comments and without downloads from a mirror."""
    lines = [re.sub(r" +# .*", "", line) for line in typed(text)]
    program = r"(?:\w+=\S+ )*(?:accelerate|bash|curl|iconv|pip|python) .*"
    return {x for x in lines if re.match(program, x) and not any(name in x for name in MIRRORS)}


def flags_in(text: str) -> set[str]:
    """Return the flags that a text names."""
    return set(re.findall(r"(?<![\w-])--[a-z]\w*(?:-\w+)*", text))


def test_both_readmes_have_the_same_commands_and_the_loop_of_pretraining():
    assert commands(TEXTS[CHINESE]) == commands(TEXTS[ENGLISH])
    program = (REPOSITORY / "train_pretrain_accelerate.py").read_text(encoding="utf-8")
    for name in (ENGLISH, CHINESE):
        (loop,) = [block for block in code_blocks(TEXTS[name]) if block.startswith("def train")]
        assert f"{loop}\n" in program


def test_both_readmes_have_the_same_numbers_in_their_tables():
    def numbers(name: str) -> list[str]:
        cells = [cell for row in rows(TEXTS[name]) for cell in row]
        plain = [
            re.sub(r"`[^`]*`|\]\([^)]*\)| |[\d.]+ ?(million|万|亿)", "", cell) for cell in cells
        ]
        # Skip whole numbers below 10: one of the languages may spell them out.
        return sorted(n for cell in plain for n in re.findall(r"\d+(?:[.,]\d+)+|\d{2,}", cell))

    assert numbers(CHINESE) == numbers(ENGLISH)


@pytest.mark.parametrize("name", [ENGLISH, CHINESE])
def test_a_readme_has_at_most_230_lines_and_links_to_every_page_of_docs(name):
    assert len(TEXTS[name].splitlines()) <= 230
    pages = {target.partition("#")[0] for target in links(TEXTS[name])}
    assert {*DOCS} - {f"{page}_zh.md" for page in TRANSLATED if name == ENGLISH} <= pages


@pytest.mark.parametrize("page", TRANSLATED)
def test_a_page_and_its_chinese_version_have_the_same_commands_and_files(page):
    english, chinese = TEXTS[f"{page}.md"], TEXTS[f"{page}_zh.md"]
    assert f"{page.removeprefix('docs/')}_zh.md" in links(english)
    assert commands(english)
    assert commands(chinese) == commands(english)
    files = [re.findall(r"`[\w/.]+\.py`", text) for text in (english, chinese)]
    assert sorted(files[0]) == sorted(files[1])


def test_the_reading_path_gives_correct_line_counts_and_at_most_2000_lines():
    total = 0
    for row in rows(TEXTS["docs/reading.md"])[2:]:
        files = [REPOSITORY / name for name in re.findall(r"`([^`]+)`", row[1])]
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        assert lines == int(row[2]), f"{row[1]} has {lines} lines"
        total += lines
    assert 1000 < total <= 2000


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_into_the_repository_leads_to_a_file_and_heading_that_exist(name):
    folder = (REPOSITORY / name).parent
    for target in links(TEXTS[name]):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        page = (folder / path).resolve() if path else REPOSITORY / name
        assert page.is_file(), f"{name} links to {target}, which is no file"
        if anchor:
            assert f"#{anchor}" in anchors(page.read_text(encoding="utf-8")), f"{name}: {target}"


def test_the_flag_tables_are_those_of_the_parser():
    assert flag_table() in TEXTS["docs/flags.md"], "python tests/flag_table.py prints the tables"
    generated, chinese = (
        [row for row in rows(text) if row[0].startswith("`--") and len(row) == 3]
        for text in (flag_table(), TEXTS["docs/flags_zh.md"])
    )
    assert [row[:2] for row in chinese] == [row[:2] for row in generated]
    for (flag, _, meaning), (_, _, translated) in zip(generated, chinese, strict=True):
        choices = re.search(r": (\w+(, \w+)+)$", meaning)
        assert not choices or translated.endswith(choices[1]), f"{flag} takes {choices[1]}"
        assert re.search(HAN, translated), f"{flag} is not explained in Chinese"


def module_commands(text: str) -> list[tuple[str, set[str]]]:
    """Return (module, flags typed after it) for every `-m MODULE` or `MODULE` of this project."""
    ours = r"(?:.* -m |)((?:scripts|benchmarks|training)\.\w+)(?!\w)(.*)"
    matches = [re.fullmatch(ours, line) for line in typed(text)]
    return [(m[1], flags_in(m[2])) for m in matches if m and m[1] != "scripts.NAME"]


@cache
def flags_of(module: str) -> set[str]:
    """Return the flags that `python -m module --help` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        importlib.import_module(module).main(["--help"])
    return flags_in(out.getvalue())


@pytest.mark.parametrize("name", TEXTS)
def test_every_named_module_exists_and_takes_the_flags_after_it(name):
    commands = module_commands(TEXTS[name])
    if name == ENGLISH:
        assert ("scripts.generate", {"--prompt"}) in commands
    for module, flags in commands:
        assert importlib.util.find_spec(module), f"{name} names {module}, which does not exist"
        unknown = flags - flags_of(module) if flags else set()
        assert not unknown, f"{name}: {module} has no {', '.join(sorted(unknown))}"


@pytest.mark.parametrize("name", [name for name in TEXTS if name not in FOREIGN])
def test_every_named_flag_exists(name):
    known = {*OTHER_FLAGS}
    for program in ("pretrain", "sft", "distillation", "several"):
        known |= flags_of(f"train_{program}_accelerate")
    scripts = [path.stem for path in (REPOSITORY / "scripts").glob("*.py")]
    texts = [(REPOSITORY / f"scripts/{stem}.py").read_text(encoding="utf-8") for stem in scripts]
    runnable = [stem for stem, text in zip(scripts, texts, strict=True) if "def main" in text]
    known = known.union(*(flags_of(f"scripts.{stem}") for stem in runnable))
    known = known.union(*(flags_of(m) for m, _ in module_commands(TEXTS[name])))
    named = flags_in("\n".join(typed(TEXTS[name])))
    assert named <= known, f"{name} names flags that do not exist: {sorted(named - known)}"


def test_our_flags_in_the_table_of_other_projects_exist():
    ours = {flag for row in rows(TEXTS["docs/coming-from.md"]) for flag in flags_in(row[0])}
    assert {"--dim", "--prompt"} <= ours
    assert ours <= flags_of("train_sft_accelerate") | flags_of("scripts.generate")


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "docs/lab-log.md"])
def test_every_named_test_exists(name):
    tests = [REPOSITORY / "tests", REPOSITORY / "tests/integration"]
    files = [path for folder in tests for path in folder.glob("test_*.py")]
    known = "\n".join(f"{path.stem}\n" + path.read_text(encoding="utf-8") for path in files)
    for test in re.findall(r"\btest_\w+", TEXTS[name]):  # perhaps only the beginning of a name
        assert re.search(rf"(^|def ){test}", known, re.MULTILINE), f"{name} names {test}"
