#!/usr/bin/env bash
# Environment, lint, tests. Arguments go to pytest: bash run_tests.sh tests/test_rotary.py -k table
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/environment.sh requirements-dev.txt
"$python" -m ruff check .
"$python" -m ruff format --check --quiet .
# Three files at a time, long ones first. "bash run_tests.sh -n 0" runs one at a time and shows its output at once.
"$python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
