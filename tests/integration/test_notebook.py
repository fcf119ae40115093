"""notebooks/pretrain.ipynb from its first cell to its last, and runs in a kernel of its kind."""

import json
from pathlib import Path

import nbformat
import pytest
from conftest import (
    REPOSITORY,
    SAFETY_NET_SECONDS,
    TINY,
    clean_environment,
    copy_repository,
    write_corpus,
)
from nbclient import NotebookClient

pytestmark = pytest.mark.slow

NOTEBOOK = Path("notebooks/pretrain.ipynb")
STEPS = 30
RESULTS = "print(json.dumps({'run': str(run), 'exported': str(exported), 'texts': [ours, theirs]}))"


def execute(notebook: nbformat.NotebookNode, folder: Path, **options) -> nbformat.NotebookNode:
    """Run all cells with the folder as working directory, on a CPU; an error ends the test."""
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        notebook, timeout=SAFETY_NET_SECONDS, kernel_name="python3", resources=resources, **options
    )
    return client.execute(env=clean_environment())


def stream(cell, name: str) -> str:
    return "".join(output.text for output in cell.outputs if output.get("name") == name)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return copy_repository(tmp_path_factory.mktemp("home") / "clone")


def test_the_notebook_is_valid_and_comes_without_outputs():
    notebook = nbformat.read(REPOSITORY / NOTEBOOK, as_version=4)
    assert list(nbformat.validator.iter_validate(notebook)) == []
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.id for cell in code if cell.outputs or cell.execution_count is not None] == []
    tagged = [cell for cell in code if "parameters" in cell.metadata.get("tags", [])]
    assert tagged == [code[0]]


@pytest.mark.variant  # of the runs in a kernel below, and of the commands in its cells
def test_the_whole_notebook_trains_draws_and_exports(root):
    """On a small text with a few steps, its parameters set as papermill does: by a cell after
    theirs."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data = write_corpus(root / "sums.jsonl", documents=2000)
    notebook = nbformat.read(root / NOTEBOOK, as_version=4)
    others = f"DATA, PROMPT, STEPS = {data.name!r}, 'sum 7: ', {STEPS}"
    first = next(i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    notebook.cells.insert(first + 1, nbformat.v4.new_code_cell(others))
    notebook.cells.append(nbformat.v4.new_code_cell(RESULTS))
    executed = execute(notebook, root / NOTEBOOK.parent)
    results = json.loads(stream(executed.cells[-1], "stdout"))
    lines = (root / results["run"] / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for line in lines if "loss" in (row := json.loads(line))]
    assert rows[-1]["step"] == STEPS
    assert rows[-1]["loss"] < rows[0]["loss"] - 2
    drawn = [cell.id for cell in executed.cells if "image/png" in str(cell.get("outputs"))]
    assert drawn == ["rotary", "curve"]
    # The exported folder loads and writes what the notebook said.
    folder = root / results["exported"]
    model, tokenizer = (c.from_pretrained(folder) for c in (AutoModelForCausalLM, AutoTokenizer))
    inputs = tokenizer("sum 7: ", return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=80, do_sample=False)[0]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert results["texts"] == [text, text]
    assert len(text) > len("sum 7: ")


LAUNCH = """
from accelerate import notebook_launcher
from train_pretrain_accelerate import main
notebook_launcher(main, args=({flags!r},), num_processes=1)
"""
# The kernel's interrupt, from a thread, once the run is in its first steps.
INTERRUPT = """
import os, signal, threading, time
from pathlib import Path
def interrupt(metrics):
    while not metrics.exists() or not metrics.stat().st_size:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, args=(Path({metrics!r}),)).start()
"""


def test_one_kernel_bears_an_interrupt_a_mistake_and_another_run(root, packed, tmp_path):
    flags = [*TINY, "--data", str(packed), "--out_dir", str(tmp_path), "--run_name", "a"]
    interrupted = INTERRUPT.format(metrics=str(tmp_path / "a" / "metrics.jsonl")) + LAUNCH.format(
        flags=[*flags, "--max_steps", "100000"]
    )
    mistaken = LAUNCH.format(flags=[*flags, "--dimm", "32"])
    # Another precision, and a picture, which the runs before must not have made impossible.
    other = LAUNCH.format(flags=[*flags[:-1], "b", "--max_steps", "2", "--dtype", "float32"])
    picture = "from matplotlib import pyplot as plt; plt.plot([1, 2]); plt.show()"
    codes = (interrupted, mistaken, other, picture)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in codes])
    cells = execute(notebook, root, allow_errors=True).cells
    assert "stopped by SIGINT" in stream(cells[0], "stdout")
    (line,) = [line for line in stream(cells[1], "stderr").splitlines() if "error:" in line]
    assert "unrecognized argument --dimm: did you mean --dim?" in line
    errors = [[o.ename for o in cell.outputs if o.output_type == "error"] for cell in cells]
    assert errors == [[], ["SystemExit"], [], []]
    assert (tmp_path / "b" / "weights").exists()
    assert "image/png" in str(cells[3].outputs)
