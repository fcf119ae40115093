"""Run docs/pretrain.ipynb from the first cell to the last."""

import json
from pathlib import Path

import nbformat
import pytest
from conftest import (
    REPOSITORY,
    SAFETY_NET_SECONDS,
    Trained,
    clean_environment,
    copy_repository,
    write_corpus,
)
from nbclient import NotebookClient

pytestmark = pytest.mark.slow

NOTEBOOK = Path("docs/pretrain.ipynb")
STEPS = 30
RESULTS = "print(json.dumps({'run': str(run), 'exported': str(exported), 'texts': [ours, theirs]}))"


def test_the_notebook_is_valid_and_has_no_outputs():
    notebook = nbformat.read(REPOSITORY / NOTEBOOK, as_version=4)
    assert list(nbformat.validator.iter_validate(notebook)) == []
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.id for cell in code if cell.outputs or cell.execution_count is not None] == []
    tagged = [cell for cell in code if "parameters" in cell.metadata.get("tags", [])]
    assert tagged == [code[0]]


@pytest.mark.variant  # other tests run the commands of the cells
def test_the_whole_notebook_trains_draws_and_exports(tmp_path):
    """The notebook runs on a small text for a few steps. After the cell with parameters, the
    test inserts a cell that overwrites three of them, as papermill does."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    root = copy_repository(tmp_path / "clone")
    data = write_corpus(root / "sums.jsonl", documents=2000)
    notebook = nbformat.read(root / NOTEBOOK, as_version=4)
    overwriting = f"DATA, PROMPT, STEPS = {data.name!r}, 'sum 7: ', {STEPS}"
    first = next(i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    notebook.cells.insert(first + 1, nbformat.v4.new_code_cell(overwriting))
    notebook.cells.append(nbformat.v4.new_code_cell(RESULTS))
    where = {"metadata": {"path": str(root / NOTEBOOK.parent)}}
    client = NotebookClient(notebook, timeout=SAFETY_NET_SECONDS, resources=where)
    executed = client.execute(env=clean_environment())  # an error in a cell ends the test
    results = json.loads(executed.cells[-1].outputs[0].text)
    rows = Trained(root / results["run"], "").rows()
    assert rows[-1]["step"] == STEPS
    assert rows[-1]["loss"] < rows[0]["loss"] - 2
    drawn = [cell.id for cell in executed.cells if "image/png" in str(cell.get("outputs"))]
    assert drawn == ["rotary", "curve"]
    # The exported model, loaded again, generates the same text as in the notebook.
    folder = root / results["exported"]
    model, tokenizer = (c.from_pretrained(folder) for c in (AutoModelForCausalLM, AutoTokenizer))
    inputs = tokenizer("sum 7: ", return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=80, do_sample=False)[0]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert results["texts"] == [text, text]
    assert len(text) > len("sum 7: ")
