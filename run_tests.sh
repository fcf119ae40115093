#!/usr/bin/env bash
# Environment, lint, tests. Arguments go to pytest: bash run_tests.sh tests/test_rotary.py -k modulus
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/environment.sh requirements-dev.txt
"$python" -m ruff check .
"$python" -m ruff format --check --quiet .
# Three at a time, the long ones first; -n 0 after the command for one, with its output as it comes.
"$python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
