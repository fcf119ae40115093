#!/usr/bin/env bash
# From a fresh clone to a trained model: environment, data, launch, result.
#
#   bash run_accelerate.sh                            train on the text of the Python standard library
#   DATA=my.jsonl bash run_accelerate.sh              train on your text (.txt, .jsonl, .csv, .parquet or a folder of them)
#   MINUTES=30 DATA=my.txt bash run_accelerate.sh     choose a model that this machine can train in 30 minutes
#   bash run_accelerate.sh --dim 512 --n_layers 8     training flags, which override the choices of this script
#   STAGE=sft bash run_accelerate.sh                  fine-tune the newest pretrained model to answer questions
#   CHAT=chat.jsonl STAGE=sft bash run_accelerate.sh  fine-tune it on your conversations
#   STAGE=distill bash run_accelerate.sh              distill the newest pretrained model (or TEACHER=out/runs/NAME) into a smaller one
#
# MINUTES=N         minutes from the command to the result, without installation (default: 4 on a CPU, 10 on a GPU);
#                   preparing text does not count if it takes more than half of them, which is announced;
#                   on several machines, minutes of training only
# PREPARE_FLAGS=... flags for the preparation of text, such as "--vocab_size 2000 --skip_bad_lines"
# NUM_PROCESSES=N   number of processes (default: one per GPU; on a CPU, one)
# ENGINE=name       the engine of configs/name.yaml (docs/engines.md); or CONFIG=file.yaml, your own file for Accelerate
# OMP_NUM_THREADS=N CPU threads per process (default: the fastest of all cores, one core less, and half of them)
# PYTHON=file       a Python to use as it is, with the packages that it has (default: one with the pinned versions, or
#                   a new .venv)
# MASTER_PORT=N     port at which the processes meet (default: any free port)
#
# For several machines, start this command on each one, in a folder that all machines see:
# NUM_MACHINES=N    number of machines; NUM_PROCESSES counts the processes of all machines
# MACHINE_RANK=R    index of this machine, from 0
# MASTER_ADDR=HOST  address of machine 0; its port is MASTER_PORT (default: 29500)
# Training flags: python train_pretrain_accelerate.py --help, or docs/flags.md
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  exec sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
fi
folder=$(dirname "${BASH_SOURCE[0]}")
for name in DATA CHAT TEACHER CONFIG PYTHON; do # relative paths start at the folder where the command was typed
  [ "$folder" -ef . ] || [[ ${!name:-} == /* ]] || [ ! -e "${!name:-}" ] || printf -v "$name" '%s' "$PWD/${!name}"
done
cd "$folder"
source scripts/environment.sh requirements.txt

# Preflight prepares the text, chooses the flags that are not typed, and reports a mistake in one line.
launch=$("$python" -m lm.launch.preflight "$@")
# The launcher runs in its own session, so that it gets each signal once, from this script. When a signal or
# --time_limit stops the processes, they save the run and create the file STOP_NOTE. Then this script exits with code 0.
printf -v RESUME_WITH '%q ' bash "$0" "$@"
for name in PYTHON MASTER_PORT CUDA_VISIBLE_DEVICES NUM_PROCESSES CONFIG ENGINE DATA CHAT TEACHER STAGE MINUTES PREPARE_FLAGS MASTER_ADDR MACHINE_RANK NUM_MACHINES; do
  [ -z "${!name+set}" ] || printf -v RESUME_WITH '%s=%q %s' "$name" "${!name}" "$RESUME_WITH"
done
export RESUME_WITH=${RESUME_WITH% } STOP_NOTE=${TMPDIR:-/tmp}/stopped-$$-$RANDOM
eval "set -- $launch"
"$(command -v setsid || echo env)" "$python" -m lm.launch.start_processes "$@" &
launcher=$!
trap 'kill -TERM "$launcher"' INT TERM HUP USR1
while :; do
  code=0
  wait "$launcher" || code=$?
  kill -0 "$launcher" 2>/dev/null || break # if the launcher is alive, a trapped signal has ended `wait`
done
[ ! -e "$STOP_NOTE" ] || { rm "$STOP_NOTE" && code=0; }
exit "$code"
