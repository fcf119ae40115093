#!/usr/bin/env bash
# Everything that waits for a GPU, in one call of under nine minutes:
#
#     bash benchmarks/gpu.sh [FOLDER]
#
# First this project's own steps, then the tests that need CUDA, then the peers. All of it goes into
# FOLDER/gpu.md (default: out/benchmarks/gpu), beside it a trace of a step of each contender of the
# first part. A part that runs out of time leaves what it has measured; the exit code is 1 if any
# part failed. PYTHON names another Python than scripts/environment.sh would find.
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
began=$SECONDS

# Each part has a second by which it ends, counted from the beginning: none takes the time of those
# after it, and what one does not need they have.
part() { # that second, title, command...
  local limit=$(($1 - (SECONDS - began))) title=$2 code why
  shift 2
  printf '\n# %s\n\n' "$title" | tee -a "$report"
  # What it prints goes into the report, its progress to the terminal and, for the last words of a
  # part that fails, into $errors. SIGINT has it say what it has measured until then.
  {
    timeout --signal=INT --kill-after=10 $((limit > 1 ? limit : 1)) "$@" 2>&1 >&3 3>&- | tee "$errors" >&2
    exit "${PIPESTATUS[0]}"
  } 3>&1 | tee -a "$report"
  code=${PIPESTATUS[0]}
  ((code)) || return
  failed=1
  why="exit code $code"
  ((code != 124 && code != 137)) || why="out of time"
  printf '\nFAILED (%s): %s\n' "$why" "$(tail -n 5 "$errors")" | tee -a "$report"
}

throughput() { # that second, title, flags...
  part "$1" "$2" "$python" -m benchmarks.throughput --keep_compile_cache "${@:3}"
}

# Batches that leave room for all contenders of a part at once: none waits for another to end.
small=(--sizes 104m --batch_size 32 --seq_len 1024 --rounds 3)
large=(--sizes 360m --batch_size 16 --rounds 3 --steps 4)
throughput 120 "104m" "${small[@]}" --steps 8 --trace "$folder" \
  --contenders ours-compiled,ours-zero2-compiled
throughput 210 "360m" "${large[@]}" --contenders ours-compiled,ours-zero2-compiled
throughput 290 "104m, accumulation 4" "${small[@]}" --steps 2 --accumulation_steps 4 \
  --contenders ours-compiled,ours-zero1-compiled,ours-zero2-compiled
part 420 "Tests on the GPU" "$python" -m pytest -v --durations=10 -m gpu tests
throughput 520 "104m, peers" "${small[@]}" --steps 8 \
  --contenders ours-compiled,transformers-compiled,litgpt-compiled
exit "$failed"
