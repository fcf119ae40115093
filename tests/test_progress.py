from common.progress import progress_bar


def test_in_a_file_each_drawing_is_a_line_and_the_end_none(capsys):
    with progress_bar(5, "step", "step") as bar:
        for number in range(2):
            bar.set_postfix_str(f"loss {number}.5", refresh=False)
            bar.update()
            bar.refresh()
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("step 2/5, loss 1.5, ")
    assert all(line.startswith("step ") and line.endswith(" left") for line in lines)
    assert lines[0].startswith("step 1/5, loss 0.5, ")
