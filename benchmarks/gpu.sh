#!/usr/bin/env bash
# Everything that waits for a GPU, in one call of under nine minutes:
#
#     bash benchmarks/gpu.sh [FOLDER]
#
# First the tests that need CUDA, then the tables of docs/performance.md. All of it goes into
# FOLDER/gpu.md (default: out/benchmarks/gpu), with the figures as JSON beside it.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:-out/benchmarks/gpu}
python=${PYTHON:-python3}
mkdir -p "$folder"
report=$folder/gpu.md
export PYTHONUNBUFFERED=1
: >"$report"

section() { # seconds, title, command...
  local limit=$1 title=$2
  shift 2
  printf '\n# %s\n\n' "$title" | tee -a "$report"
  # Progress goes to the terminal alone; a step that fails or takes too long leaves its last words.
  if ! timeout "$limit" "$@" > >(tee -a "$report") 2> >(tee "$folder/last.err" >&2); then
    printf '\nFAILED: %s\n' "$(tail -n 5 "$folder/last.err")" | tee -a "$report"
  fi
}

section 150 "Tests on the GPU" "$python" -m pytest -q -m gpu tests
section 130 "104m" "$python" -m benchmarks.throughput --sizes 104m --batch_size 64 --seq_len 1024 \
  --contenders ours-compiled,ours-eager,ours-zero2-compiled,transformers-compiled,litgpt-compiled \
  --rounds 3 --steps 8 --json "$folder/104m.json"
section 160 "360m" "$python" -m benchmarks.throughput --sizes 360m \
  --contenders ours-compiled,ours-zero2-compiled,transformers-compiled \
  --rounds 3 --steps 4 --json "$folder/360m.json"
