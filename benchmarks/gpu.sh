#!/usr/bin/env bash
# Everything that waits for a GPU, in one call of under nine minutes:
#
#     bash benchmarks/gpu.sh [FOLDER]
#
# First this project's own steps, then the tests that need CUDA, then the peers. All of it goes into
# FOLDER/gpu.md (default: out/benchmarks/gpu). A part that runs out of time leaves what it has
# measured; the exit code is 1 if any part failed. PYTHON names another Python than
# scripts/environment.sh would find.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:-out/benchmarks/gpu}
python=${PYTHON:-}
[ -n "$python" ] || source scripts/environment.sh requirements-dev.txt
mkdir -p "$folder"
report=$folder/gpu.md
errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
export PYTHONUNBUFFERED=1
: >"$report"
failed=0
end=$((SECONDS + 520))

part() { # seconds at most, title, command...
  local limit=$1 title=$2 left=$((end - SECONDS)) code why
  shift 2
  ((limit < left)) || limit=$((left > 1 ? left : 1))
  printf '\n# %s\n\n' "$title" | tee -a "$report"
  # What it prints goes into the report, its progress to the terminal and, for the last words of a
  # part that fails, into $errors. SIGINT has it say what it has measured until then.
  {
    timeout --signal=INT --kill-after=10 "$limit" "$@" 2>&1 >&3 3>&- | tee "$errors" >&2
    exit "${PIPESTATUS[0]}"
  } 3>&1 | tee -a "$report"
  code=${PIPESTATUS[0]}
  ((code)) || return
  failed=1
  why="exit code $code"
  ((code != 124 && code != 137)) || why="out of time"
  printf '\nFAILED (%s): %s\n' "$why" "$(tail -n 5 "$errors")" | tee -a "$report"
}

throughput() { # flags
  part "$1" "$2" "$python" -m benchmarks.throughput --keep_compile_cache "${@:3}"
}

# Batches that leave room for all contenders of a part at once: none waits for another to end.
small=(--sizes 104m --batch_size 32 --seq_len 1024 --rounds 3 --steps 8)
large=(--sizes 360m --batch_size 16 --rounds 3 --steps 4)
throughput 100 "104m" "${small[@]}" --contenders ours-compiled,ours-zero2-compiled
throughput 110 "360m" "${large[@]}" --contenders ours-compiled,ours-zero2-compiled
part 190 "Tests on the GPU" "$python" -m pytest -v --durations=10 -m gpu tests
throughput 120 "104m, peers" "${small[@]}" \
  --contenders ours-compiled,transformers-compiled,litgpt-compiled
throughput 120 "360m, peers" "${large[@]}" --contenders ours-compiled,transformers-compiled
exit "$failed"
