#!/usr/bin/env bash
# From a fresh clone to a trained model: environment, data, launch, result.
#
#   bash run_accelerate.sh                          the Python standard library as text
#   DATA=my.jsonl bash run_accelerate.sh            your own text (.txt, .jsonl, .csv, .parquet or a folder of them)
#   MINUTES=30 DATA=my.txt bash run_accelerate.sh   the model that this machine can train in this time
#   bash run_accelerate.sh --dim 512 --n_layers 8   training flags, which override the choices of this script
#   STAGE=sft bash run_accelerate.sh                fine-tune the newest pretrained model to answer questions
#   CHAT=my.jsonl STAGE=sft bash run_accelerate.sh  on your own conversations
#   STAGE=distill bash run_accelerate.sh            distill the newest pretrained model (or TEACHER=out/runs/NAME) into a smaller one
#
# MINUTES=N         time from the command to the result, without installing (default: 4 on a CPU, 10 on a GPU)
# PREPARE_FLAGS=... flags of the text preparation, such as "--vocab_size 2000 --skip_bad_lines"
# NUM_PROCESSES=N   number of processes (default: one per GPU, or one on a CPU)
# ENGINE=name       another engine, one of configs/*.yaml (docs/engines.md), or CONFIG=file.yaml for your own file
# MASTER_PORT=N     port at which the processes meet (default: any free port)
#
# For several machines, start this command on each one, in a folder that all machines see:
# NUM_MACHINES=N    number of machines; NUM_PROCESSES counts the processes of all machines
# MACHINE_RANK=R    number of this machine, from 0
# MASTER_ADDR=HOST  address of machine 0; its port is MASTER_PORT (default: 29500)
# Training flags: python train_pretrain_accelerate.py --help, or docs/flags.md
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  exec sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
fi
folder=$(dirname "${BASH_SOURCE[0]}")
for name in DATA CHAT TEACHER; do # relative paths begin in the folder where the command was typed
  [ "$folder" -ef . ] || [ ! -e "${!name:-}" ] || printf -v "$name" '%s' "$(realpath "${!name}")"
done
cd "$folder"
source scripts/environment.sh requirements.txt

# Preflight prepares the text, chooses what is not typed, and reports a mistake in one line.
launch=$("$python" -m training.preflight "$@")
# The launcher runs in its own session, so that it gets each signal once, from this script. Processes that stop on a
# signal create the file STOP_NOTE after saving. The exit code is then 0.
printf -v RESUME_WITH '%q ' bash "$0" "$@"
for name in MASTER_PORT CUDA_VISIBLE_DEVICES NUM_PROCESSES CONFIG ENGINE DATA CHAT TEACHER STAGE MINUTES PREPARE_FLAGS MASTER_ADDR MACHINE_RANK NUM_MACHINES; do
  [ -z "${!name:-}" ] || printf -v RESUME_WITH '%s=%q %s' "$name" "${!name}" "$RESUME_WITH"
done
export RESUME_WITH=${RESUME_WITH% } STOP_NOTE=$PWD/out/.stopped-$HOSTNAME-$$
eval "set -- $launch"
"$(command -v setsid || echo env)" "$python" -m training.launcher "$@" &
launcher=$!
trap 'kill -TERM "$launcher"' INT TERM HUP USR1
while :; do
  code=0
  wait "$launcher" || code=$?
  kill -0 "$launcher" 2>/dev/null || break # otherwise a trapped signal ended `wait`, not the launcher
done
[ ! -e "$STOP_NOTE" ] || { rm "$STOP_NOTE" && code=0; }
exit "$code"
