from pathlib import Path

from runs.folder import RunFolder


def test_every_file_of_a_run_lies_in_its_folder():
    run = RunFolder(Path("out/runs/x"))
    assert all(str(path).startswith("out/runs/x") for path in vars(run).values())
    assert run.checkpoint(7) == Path("out/runs/x/checkpoints/step-00000007")


def test_checkpoints_come_oldest_first_and_nothing_else_is_one(tmp_path):
    run = RunFolder(tmp_path)
    for step in (1000, 9, 10):
        run.checkpoint(step).mkdir(parents=True)
    for other in ("step-00000011.partial-7", "step-00000012.old-7", "step-00000013.aside-7"):
        (run.checkpoints / other).mkdir()
    run.latest.write_text("step-00001000\n", encoding="utf-8")
    assert run.all_checkpoints() == [run.checkpoint(step) for step in (9, 10, 1000)]
