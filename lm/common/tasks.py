"""The variables with which srun, mpirun or a platform starts several tasks of one program."""

import os

from lm.common.errors import UsageError

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # torchrun's names
OF_MPI = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
# What starts a process per task → the names that it gives to RANKS.
TASKS = {
    "the platform": RANKS,
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE"),
    "mpirun": tuple(f"OMPI_COMM_WORLD_{name}" for name in OF_MPI),
    "mpirun_rsh": tuple(f"MV2_COMM_WORLD_{name}" for name in OF_MPI),  # MVAPICH
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def starter_of_tasks() -> str | None:
    """Return which of TASKS has started several processes with this process's command, or None."""
    environ = os.environ
    # The script of sbatch and the shell of salloc are no task, although they know SLURM_NTASKS.
    in_step = "SLURM_STEP_ID" in environ or "SLURM_JOB_ID" not in environ
    alone = environ.get("SLURM_STEP_NUM_TASKS") == "1" or "SLURM_PROCID" not in environ
    for starter, (_, total, *_) in TASKS.items():
        several = environ.get(total, "").isdecimal() and int(environ[total]) > 1
        if several and (starter != "srun" or (in_step and not alone)):
            return starter
    return None


def join_tasks() -> None:
    """Set RANKS, so that all tasks of srun or mpirun train one run. If there is one task, forget
    the variables of its platform. Raises UsageError if the tasks do not know where to meet."""
    environ = os.environ
    if {"TORCHELASTIC_RUN_ID", "LOCAL_SIZE"} & {*environ}:  # a launcher has set RANKS
        return
    if (starter := starter_of_tasks()) is None:
        forget_tasks()
        return
    pairs = zip(RANKS, TASKS[starter], strict=True)
    values = {name: environ[theirs] for name, theirs in pairs if environ.get(theirs)}
    first = "$(scontrol show hostnames | head -n 1)" if starter == "srun" else "HOST_OF_RANK_0"
    needed = {"RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": first, "MASTER_PORT": 29500}
    if missing := [name for name in needed if not (values.get(name) or environ.get(name))]:
        typed = " ".join(f"{name}={needed[name]}" for name in missing)
        alone = f"{starter} has started {values['WORLD_SIZE']} processes, which would train alone"
        raise UsageError(f"{alone}: for one run of all (docs/engines.md), first export {typed}")
    # SLURM writes "2(x3)" for two tasks on each of three machines.
    environ.update({name: value.partition("(")[0] for name, value in values.items()})


def forget_tasks() -> None:
    """Unset the variables of TASKS, and PET_*, which are flags of torchrun: libraries read them."""
    if "RANK" in os.environ and not os.environ.get("NUM_MACHINES"):
        os.environ.pop("MASTER_ADDR", None)
        os.environ.pop("MASTER_PORT", None)
    theirs = {name for names in TASKS.values() for name in names}
    for name in [name for name in os.environ if name in theirs or name.startswith("PET_")]:
        del os.environ[name]
