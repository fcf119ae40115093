#!/usr/bin/env bash
# Train on several machines under SLURM. Submit from the repository's folder, which all machines must see:
#
#   DATA=my.jsonl sbatch --nodes 4 configs/slurm.sh --dim 1024 --n_layers 32
#
# This file takes training flags. It has not run on a cluster yet. Five minutes before the job's time limit, the run
# saves and ends. To continue, submit with its --run_name (default: job-NUMBER). If a machine fails, SLURM restarts it.
#SBATCH --job-name=pretrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
export NUM_MACHINES=$SLURM_NNODES
names=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${names%%$'\n'*} # the first machine
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) # differs between jobs, which may share a machine
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240 # seconds for a save after a signal; PyTorch before 2.12 always allows 30
name=()
[[ " $*" == *" --run_name"* || " $*" == *" --resume"* ]] || name=(--run_name "job-$SLURM_JOB_ID")
[[ " $*" == *" --resume"* ]] || name+=(--resume auto)
exec srun --kill-on-bad-exit=1 bash -c 'MACHINE_RANK=$SLURM_NODEID exec bash run_accelerate.sh "$@"' _ \
  "${name[@]}" "$@"
