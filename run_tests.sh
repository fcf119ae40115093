#!/usr/bin/env bash
# Environment, lint, tests. Arguments go to pytest: bash run_tests.sh tests/test_rotary.py -k modulus
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/environment.sh requirements-dev.txt
"$python" -m ruff check .
"$python" -m ruff format --check --quiet .
"$python" -m pytest "$@"
