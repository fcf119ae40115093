#!/usr/bin/env bash
# From a fresh clone to a trained model: environment, data, launch, result.
#
#   bash run_accelerate.sh                          the Python standard library as text
#   DATA=my.jsonl bash run_accelerate.sh            your own text (.txt, .jsonl, .csv, .parquet or a folder of them)
#   bash run_accelerate.sh --dim 512 --n_layers 8   training flags, which override this script's flags
#   STAGE=sft bash run_accelerate.sh                fine-tune the newest pretrained model to answer questions
#   CHAT=my.jsonl STAGE=sft bash run_accelerate.sh  on your own conversations
#   STAGE=distill bash run_accelerate.sh            distill the newest pretrained model (or TEACHER=out/runs/NAME) into a smaller one
#
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
wrong() { echo "run_accelerate.sh: error: $1" >&2; exit 2; }
machines=${NUM_MACHINES:-1} machine=${MACHINE_RANK:-0} port=${MASTER_PORT:-0}
[ -n "${NUM_MACHINES:-}" ] || [ -z "${MACHINE_RANK:-}${MASTER_ADDR:-}" ] ||
  wrong "MACHINE_RANK and MASTER_ADDR are for several machines: set NUM_MACHINES too"
[[ $machines$machine$port != *[^0-9]* ]] && ((machine < machines && port < 65536)) ||
  wrong "NUM_MACHINES, MACHINE_RANK (from 0 on) and MASTER_PORT (below 65536) cannot be $machines, $machine and $port"
meeting= # the launcher's flags for several machines
if ((machines > 1)); then
  port=${MASTER_PORT:-29500}
  meeting="--num_machines $machines --machine_rank $machine --main_process_ip ${MASTER_ADDR:-} --deepspeed_multinode_launcher standard"
fi
stage=${STAGE:-pretrain}
case $stage in
  pretrain) program=train_pretrain_accelerate.py unused="CHAT TEACHER" ;;
  sft) program=train_sft_accelerate.py unused="DATA TEACHER" ;;
  distill) program=train_distillation_accelerate.py unused="DATA CHAT PREPARE_FLAGS" ;;
  *) wrong "STAGE must be pretrain, sft or distill, not $stage" ;;
esac
for name in $unused; do
  [ -z "${!name:-}" ] || wrong "STAGE=$stage does not use $name: see bash run_accelerate.sh --help"
done
folder=$(dirname "${BASH_SOURCE[0]}")
for name in DATA CHAT TEACHER; do # relative paths begin in the folder where the command was typed
  [ "$folder" -ef . ] || [ ! -e "${!name:-}" ] || printf -v "$name" '%s' "$(realpath "${!name}")"
done
cd "$folder"
engine=${ENGINE:-} config=${CONFIG:-accelerate_config.yaml}
if [ -n "$engine" ]; then
  config=configs/$engine.yaml
  [ -z "${CONFIG:-}" ] || wrong "ENGINE names a file in configs/, CONFIG your own file: set either"
  [ -f "$config" ] || wrong "ENGINE=$engine does not exist: choose one of $(cd configs && echo *.yaml | sed 's/\.yaml//g')"
fi
source scripts/environment.sh requirements.txt
((machines == 1)) || "$python" -c 'import socket, sys; socket.getaddrinfo(sys.argv[1], 0)' "${MASTER_ADDR:-}" 2>/dev/null ||
  wrong "MASTER_ADDR must be the address of machine 0: this machine cannot resolve '${MASTER_ADDR:-}'"

# This script prepares text. The training program prepares conversations, with the tokenizer of its model.
data=${DATA:-builtin}
if [ "$stage" = pretrain ]; then
  packed=$("$python" -c 'import sys; from data.prepared import default_out as f; print(f(*sys.argv[1:]))' "$data" "${PREPARE_FLAGS:-}")
  how=(--overwrite "--flags=${PREPARE_FLAGS:-}")
  [ -n "${PREPARE_FLAGS:-}" ] || how=(--reuse) # accept data that was prepared by hand
  if [[ " $* " != *" --data"[=\ ]* ]]; then
    "$python" -m scripts.prepare_data --data "$data" --out "$packed" "${how[@]}"
  elif [ -n "${DATA:-}${PREPARE_FLAGS:-}" ]; then
    wrong "--data names prepared data, DATA and PREPARE_FLAGS prepare data: give either"
  fi
fi

gpus=0
! command -v nvidia-smi rocm-smi >/dev/null ||
  gpus=$("$python" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
((gpus > 0)) || export DS_ACCELERATOR=cpu # DeepSpeed would warn that it found no GPU
# share: sequences per process and step, which preflight divides into micro-batches that fit into a GPU's memory;
# 0: the flags decide; cpu: preflight adds the steps and the optimizer that suit a CPU.
text=(--data "${packed:-}")
[ "$stage" != distill ] || text=(--teacher "${TEACHER:-auto}")
if [ "$stage" = sft ]; then
  text=(--conversations "${CHAT:-builtin}" "--prepare_flags=${PREPARE_FLAGS:-}") # with "=", because the value may begin with --
  flags=(--dtype bfloat16 --batch_size 16) share=16
  ((gpus > 0)) || { flags+=(--epochs 2 --learning_rate 2e-3) share=0; } # a small model takes a higher rate
elif ((gpus > 0)); then
  flags=(--epochs 3 --batch_size 24 --accumulation_steps 32 --max_seq_len 1024)
  flags+=(--use_flash_attn --dtype bfloat16 --learning_rate 2e-4 --grad_clip 1.0) share=$((24 * 32))
  shape=(--dim 1024 --n_layers 32)
  [ "$stage" = pretrain ] || shape=(--dim 768 --n_layers 16)
else # a small model that two cores train in a few minutes
  flags=(--batch_size 16 --accumulation_steps 1 --max_seq_len 256 --dtype bfloat16 --grad_clip 1.0)
  flags+=(--log_interval 20 --eval_interval 100 --sample_interval 100 --save_interval 200) share=cpu
  shape=(--dim 192 --n_layers 4 --n_heads 4)
  [ "$stage" = pretrain ] || shape=(--dim 128 --n_layers 4 --n_heads 4)
fi
flags+=("${text[@]}")
[[ $stage != pretrain || $data != builtin ]] || flags+=(--sample_prompt "def")
[ "$stage" = sft ] || [[ " $* " == *" --init_from"* ]] || flags+=("${shape[@]}") # the weights of --init_from decide the shape
[ "$engine" != fp16 ] || flags+=(--dtype float16)
((gpus == 0)) || [[ " $*" != *" --batch_size"* && " $*" != *" --accumulation_steps"* ]] || share=0
flags+=("$@")

processes=${NUM_PROCESSES:-$((machines * (gpus > 0 ? gpus : 1)))}
[[ $processes =~ [^0-9] ]] || ((10#$processes % machines == 0)) ||
  wrong "NUM_PROCESSES counts the processes of all machines: $processes cannot be divided among $machines"
echo "starting $processes process(es); PyTorch and DeepSpeed load twice, to check the flags and to train, which takes a while"
# Preflight reports a mistake in flags, data or configuration in one line, before any process is launched.
decided=$("$python" -m training.preflight "$program" "$config" "$processes" "$share" "${flags[@]}")
flags+=($decided)
# The launcher runs in its own session, so that it gets each signal once, from this script. Processes that stop on a
# signal create the file STOP_NOTE after saving. The exit code is then 0.
printf -v RESUME_WITH '%q ' bash "$0" "$@"
for name in MASTER_PORT CUDA_VISIBLE_DEVICES NUM_PROCESSES CONFIG ENGINE DATA CHAT TEACHER STAGE PREPARE_FLAGS MASTER_ADDR MACHINE_RANK NUM_MACHINES; do
  [ -z "${!name:-}" ] || printf -v RESUME_WITH '%s=%q %s' "$name" "${!name}" "$RESUME_WITH"
done
export RESUME_WITH=${RESUME_WITH% } STOP_NOTE=$PWD/out/.stopped-$HOSTNAME-$$
"$(command -v setsid || echo env)" "$python" -m training.launcher --config_file "$config" \
  --num_processes "$processes" --main_process_port "$port" $meeting \
  "$program" "${flags[@]}" &
launcher=$!
trap 'kill -TERM "$launcher"' INT TERM HUP USR1
while :; do
  code=0
  wait "$launcher" || code=$?
  kill -0 "$launcher" 2>/dev/null || break # otherwise a trapped signal ended `wait`, not the launcher
done
[ ! -e "$STOP_NOTE" ] || { rm "$STOP_NOTE" && code=0; }
exit "$code"
