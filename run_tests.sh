#!/usr/bin/env bash
# Prepare the environment, check the style, run the tests. Arguments go to pytest: bash run_tests.sh -k table
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/environment.sh requirements-dev.txt
"$python" -m ruff check .
"$python" -m ruff format --check --quiet .
# pytest runs three files at a time, first the slow ones in tests/integration. With -n 0 it runs one file at a time.
"$python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
