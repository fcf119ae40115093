#!/usr/bin/env bash
# Run all checks and measurements that need one GPU, in under half an hour:
#
#     bash benchmarks/gpu.sh [FOLDER [PART...]]
#
# The report is FOLDER/gpu.md (default FOLDER: out/benchmarks/gpu). FOLDER also gets a trained run
# with a profiler trace. The names of the parts are below; the first parts tell the most. Without
# PART all parts run. If a part takes too long, it is stopped and the report has its measurements so
# far. The exit code is 1 if a part failed. PYTHON=... replaces the Python of scripts/environment.sh.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:-out/benchmarks/gpu}
wanted=" ${*:2} "
python=${PYTHON:-}
[ -n "$python" ] || source scripts/environment.sh requirements-dev.txt
mkdir -p "$folder"
report=$folder/gpu.md
errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
export PYTHONUNBUFFERED=1
: >"$report"
failed=0

part() { # name, time limit in seconds, command...
  local name=$1 limit=$2 code why
  shift 2
  [[ $wanted == "  " || $wanted == *" $name "* ]] || return 0
  printf '\n# %s\n\n' "$name" | tee -a "$report"
  # stdout goes into the report. stderr goes to the terminal, and into $errors for the message of a
  # part that fails. After SIGINT a benchmark prints its measurements so far.
  {
    timeout --signal=INT --kill-after=10 "$limit" "$@" 2>&1 >&3 3>&- | tee "$errors" >&2
    exit "${PIPESTATUS[0]}"
  } 3>&1 | tee -a "$report"
  code=${PIPESTATUS[0]}
  ((code)) || return 0
  failed=1
  why="exit code $code"
  ((code != 124 && code != 137)) || why="out of time"
  printf '\nFAILED (%s): %s\n' "$why" "$(tail -n 5 "$errors")" | tee -a "$report"
}

throughput=("$python" -m benchmarks.throughput --keep_compile_cache --rounds 3)
small=(--sizes 104m --batch_size 32 --seq_len 1024)
zero=ours-compiled,ours-zero1-compiled,ours-zero2-compiled
part steps 120 "${throughput[@]}" "${small[@]}" --contenders ours-compiled,ours-zero2-compiled
part tests 150 "$python" -m pytest -v --durations=10 -m gpu tests
part peers 150 "${throughput[@]}" "${small[@]}" \
  --contenders ours-compiled,transformers-compiled,litgpt-compiled
part training 150 "$python" train_pretrain_accelerate.py --max_steps 60 --batch_size 32 --log_with none \
  --profile --profile_interval 40 --out_dir "$folder" --run_name "run-$(date +%s)"
part large 120 "${throughput[@]}" --sizes 360m --batch_size 16 --steps 4 \
  --contenders ours-compiled,ours-zero2-compiled
part accumulation 120 "${throughput[@]}" "${small[@]}" --steps 2 --accumulation_steps 4 \
  --contenders "$zero"
part muon 120 "${throughput[@]}" "${small[@]}" --contenders ours-compiled,ours-compiled+muon
part recompute 150 "${throughput[@]}" "${small[@]}" \
  --contenders ours-compiled,ours-compiled+blocks,ours-compiled+selective
part generation 120 "$python" -m benchmarks.generation --sizes 26m,104m
part data 120 "$python" -m benchmarks.data --loader_seq_lens 512 --model_tokens_per_second 500000
part engines 300 "$python" -m benchmarks.engines --dtype bfloat16
exit "$failed"
