"""Write a page with charts of one or several runs. The runs may still be in progress.

python -m scripts.report RUN [RUN ...]
"""

from functools import partial
from pathlib import Path

from lm.common.errors import UsageError, one_line_errors
from lm.common.parser import OneLineParser
from lm.report.page import write_report
from lm.storage.find import find_run
from lm.storage.folder import RunFolder


@one_line_errors("report", UsageError, OSError)
def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m scripts.report", description=__doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run folder, or 'auto' for the newest run")
    add("--out", type=Path, help="page (default: RUN/report.html; several RUNs: out/report.html)")
    args = parser.parse_args(argv)
    find = partial(find_run, is_wanted=lambda run: run.metrics.exists())
    runs = list(dict.fromkeys(map(find, args.runs)))
    out = args.out or (RunFolder(runs[0]).report if len(runs) == 1 else Path("out/report.html"))
    write_report(runs, out)
    print(f"report: {out}")


if __name__ == "__main__":
    main()
