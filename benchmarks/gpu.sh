#!/usr/bin/env bash
# Check and measure training on one GPU, within nine minutes and without a network:
#
#     bash benchmarks/gpu.sh [--tiny]
#     PARTS="start 104mx1" bash benchmarks/gpu.sh
#
# --tiny rehearses with tiny models that are not compiled, also without a GPU: its speeds mean nothing. Parts run one
# after the other, the most useful first; each one is ended at its time limit. The folder $OUT (default:
# out/benchmarks/gpu) has these files: gpu.md, the report, with what each part has printed at its end; it grows whenever a
# part ends; traces.zip, traces of the last micro-batch and the update of a step, for https://ui.perfetto.dev; log.txt,
# the output of all parts.
#
# The Python is $PYTHON, or python3 if it has PyTorch, or .venv/bin/python. The script installs only the
# wheels in out/wheels, into out/site. On a machine with a network, the next command puts wheels (6 MB) for Python
# 3.12 on Linux into out/wheels: DeepSpeed, and those of its dependencies that a Python with Accelerate may lack.
#
#     python3 -m pip wheel --no-deps --wheel-dir out/wheels deepspeed==0.19.8 hjson gguf==0.19.0 &&
#     python3 -m pip download --no-deps --only-binary :all: --dest out/wheels --python-version 3.12 \
#         --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 pydantic==2.14.4 pydantic-core==2.50.5 annotated-types \
#         typing-inspection typing-extensions einops msgpack ninja py-cpuinfo sentencepiece==0.2.3
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
has_torch='import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'
[ -n "${PYTHON:-}" ] || python3 -c "$has_torch" || python=.venv/bin/python
out=${OUT:-out/benchmarks/gpu}
mkdir -p "$out"
rm -f "$out"/{gpu.md,traces.zip,log.txt}
export PYTHONPATH="$PWD/out/site:${PYTHONPATH:-}" TORCHINDUCTOR_CACHE_DIR="$PWD/out/compiled/gpu" PYTHONUNBUFFERED=1
trap 'kill $(jobs -p) 2>/dev/null; exit 130' INT TERM
failed=0 first=passed

# part NAME SECONDS COMMAND...: run a command for at most so many seconds, and add its last lines to the report.
part() {
  local name=$1 seconds=$2 left=$((525 - SECONDS)) began=$SECONDS result="left out" code
  case " ${PARTS:-$name} " in *" $name "*) ;; *) return ;; esac
  ((seconds < left)) || seconds=$left
  : >"$out/part.txt"
  if [ "$first" = passed ] && ((seconds >= 5)); then
    # timeout ends all processes of the command's group. In the background, so that the trap works at once.
    timeout --kill-after 10 "$seconds" "${@:3}" >"$out/part.txt" 2>&1 </dev/null &
    wait $!
    code=$?
    case $code in 0) result=passed ;; 124 | 137) result="out of time" ;; *) result="failed, exit code $code" ;; esac
    # A compiler that was ended leaves unfinished files.
    [ "$result" != "out of time" ] || rm -rf "$TORCHINDUCTOR_CACHE_DIR"
  fi
  [ "$result" = passed ] || failed=1
  [ "$name" != start ] || first=$result
  { echo "## $name: $result, $((SECONDS - began)) s"; echo; tail -40 "$out/part.txt"; echo; } | tee -a "$out/gpu.md"
  { echo "# $name: ${*:3}"; cat "$out/part.txt"; } >>"$out/log.txt"
}

# steps NAME SECONDS CONTENDERS FLAGS...: measure steps of training.
steps() {
  part "$1" "$2" "$python" -m benchmarks.throughput --traces "$out/traces.zip" --rounds 2 --contenders $3 "${@:4}"
}

small=(--sizes 104m --batch_size 32 --seq_len 1024) large=(--sizes 360m --batch_size 16) how=compiled minutes=2
if [ "${1:-}" = --tiny ]; then
  tiny=(--dtype float32 --warmup_steps 1 --rounds 1 --steps 2)
  small=(--sizes test "${tiny[@]}") large=(--sizes 3m --batch_size 1 --seq_len 16 "${tiny[@]}") how=eager minutes=0.3
fi
ours="ours-$how ours-zero2-$how"
start='
import sys, torch
from pathlib import Path
from benchmarks.cli import heading
from benchmarks.work import DATA, SIZES
from scripts.check_pins import differences
print(heading("", []).splitlines()[0])
print("other versions than in requirements.txt:", differences(Path("requirements.txt")))
SIZES["test"].on(DATA)  # prepares the text
sys.exit(None if sys.argv[1:] or torch.cuda.is_available() else "there is no GPU; --tiny rehearses without one")'
if compgen -G "out/wheels/*.whl" >/dev/null; then
  part wheels 60 "$python" -m pip install --quiet --no-index --no-deps --upgrade --target out/site out/wheels/*.whl
fi
part start 90 "$python" -c "$start" "$@"
# All tests that need a GPU. Starting processes takes most of the time: 8 at once.
part tests 150 "$python" -m pytest -n 8 -q --tb=short -m gpu tests/integration/test_gpu.py tests/test_decoder.py
part run_accelerate.sh 200 env MINUTES=$minutes PYTHON="$python" bash run_accelerate.sh
steps 104mx1 170 "$ours transformers-$how" --accumulation_steps 1 --steps 10 "${small[@]}"
steps 360mx1 140 "$ours" --accumulation_steps 1 --steps 10 "${large[@]}"
steps 104mx8 170 "$ours ours-zero2-$how+uncoalesced" --accumulation_steps 8 --steps 3 "${small[@]}"
steps 360mx8 140 "$ours" --accumulation_steps 8 --steps 3 "${large[@]}"
rm -f "$out/part.txt"
exit $failed
