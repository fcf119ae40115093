"""Start programs without the seconds that each of them spends on imports.

A helper process imports PyTorch, DeepSpeed and other libraries once and forks for every program. A
fork is set up like a fresh interpreter. The launchers of Accelerate, PyTorch and DeepSpeed run
unchanged, but the Python processes that they start are forks too. Differences from a fresh
interpreter: modules are loaded before the program imports them, sets have the same order in all
processes, NumPy's BLAS has one thread, and /proc/PID has the helper's command line and environment.
"""

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LAUNCHERS = ("accelerate.commands", "torch.distributed.run", "deepspeed.launcher")
# Modules whose import takes time.
MODULES = (
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.profiler"),
    *("torch.distributed.run", "torch.utils.tensorboard", "torch.utils.cpp_extension"),
    *("accelerate", "accelerate.commands.launch", "transformers.integrations.deepspeed"),
    *("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.ops.op_builder"),
    *("deepspeed.module_inject.auto_ep_layer", "matplotlib.figure", "numpy.ctypeslib"),
    "matplotlib.backends.backend_agg",
)
PROGRAMS = ("train_pretrain_accelerate", "scripts.evaluate", "scripts.prepare_data")
POLL_SECONDS = 0.01
PR_SET_PDEATHSIG = 1  # from sys/prctl.h


def without_launcher(environ: dict[str, str]) -> dict[str, str]:
    """Return an environment without a GPU and without a launcher's variables."""
    clean = {k: v for k, v in environ.items() if not k.startswith(("ACCELERATE_", "TORCHELASTIC"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHON"):
        clean.pop(name, None)
    return clean | {"CUDA_VISIBLE_DEVICES": ""}


@functools.cache
def helper() -> subprocess.Popen:
    """Start the process that forks, once. When the tests end, it and its forks end too."""
    environ = without_launcher(os.environ)
    environ.pop("PYTHONPATH", None)  # each program may have its own
    # NumPy would start its threads at once, and a process with threads must not be forked.
    environ["OPENBLAS_NUM_THREADS"] = "1"
    return subprocess.Popen(
        [sys.executable, __file__],
        cwd=REPOSITORY,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C at the terminal must reach only the tests
        text=True,
    )


def ask(*request):
    """Send a request to the helper, see `serve`; return its answer."""
    helper().stdin.write(json.dumps(request) + "\n")
    helper().stdin.flush()
    return json.loads(helper().stdout.readline())


class WarmProcess:
    """A program that runs in a fork, in the repository; it is used like a subprocess.Popen.

    Args:
        command: its first word must be sys.executable.
        output: an open file with a name, for stdout and stderr.
    """

    def __init__(self, command: list[str], environ: dict[str, str], output):
        assert command[0] == sys.executable
        self.pid: int = ask("start", command[1:], environ, output.name)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(POLL_SECONDS)
        return self.returncode

    def send_signal(self, number: int) -> None:
        ask("send_signal", self.pid, number)

    def abandon(self) -> None:
        """Kill the program. The forks that it started end too."""
        self.send_signal(signal.SIGKILL)


# From here on: code of the helper and of its forks.


class Forked(subprocess.Popen):
    """A Python program that runs in a fork of this process."""

    def __init__(self, words, environ, search, output=None, start_new_session=False):
        self.args, self.returncode = words, None
        self.stdin = self.stdout = self.stderr = None
        # The methods of Popen read these attributes.
        self._child_created, self._waitpid_lock = True, threading.Lock()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            if start_new_session:
                os.setsid()
            become(words, environ, search, output)


def become(words: list[str], environ: dict, search: list[str], output: str | None):
    """Run a program as a fresh interpreter would, and exit.

    Args:
        words: the command line after "python".
        search: a fresh interpreter's sys.path without its first entry.
        output: the file for stdout and stderr; None keeps the streams of this process.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if output is not None:
        file = os.open(output, os.O_WRONLY | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
    os.environ.clear()
    os.environ.update(environ)
    code = 1
    try:
        try:
            run_program(list(words), search)
            code = 0
        except (Exception, KeyboardInterrupt):
            sys.excepthook(*sys.exc_info())  # the hook may exit with another code
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
    finally:  # as Python does when it ends
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_program(words: list[str], search: list[str]) -> None:
    import numpy as np
    import torch

    np.random.seed()
    torch.default_generator.seed()
    if threads := os.environ.get("OMP_NUM_THREADS"):  # OpenMP read it before the fork
        torch.set_num_threads(int(threads))
    if words[0] == "-u":
        sys.stdout.reconfigure(line_buffering=True)
        del words[0]
    is_module = words[0] == "-m"
    if is_module:
        del words[0]
    name, sys.argv = words[0], words
    subprocess.Popen = subprocess_handler.Popen = POPEN
    if name.startswith(LAUNCHERS):
        subprocess.Popen = subprocess_handler.Popen = functools.partial(popen, search)
    first = os.getcwd() if is_module else str(Path(name).resolve().parent)
    more = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [first, *dict.fromkeys([*more, *search])]
    importlib.invalidate_caches()
    if is_module:
        sys.argv[0] = importlib.util.find_spec(name).origin
        sys.modules.pop(name, None)  # a fresh interpreter has not imported it
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")


def popen(search: list[str], args, env=None, start_new_session=False, **others):
    """Replace Popen in a launcher: fork if the command is this Python, else start a process."""
    if args[0] != sys.executable:
        return POPEN(args, env=env, start_new_session=start_new_session, **others)
    environ = dict(os.environ if env is None else env)
    return Forked(args[1:], environ, search, start_new_session=start_new_session)


def import_everything() -> list[str]:
    """Import all modules; return sys.path without this file's folder."""
    search = sys.path[1:]
    sys.path[0] = str(REPOSITORY)
    for name in (*MODULES, *PROGRAMS):
        importlib.import_module(name)
    gc.freeze()
    return search


def serve() -> None:
    """Answer each line of stdin, "start" or a method of a fork, with one line of stdout."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # imports may print
    search, started = import_everything(), {}
    for line in requests:
        what, *facts = json.loads(line)
        if what == "start":
            words, environ, output = facts
            process = Forked(words, environ, search, output)
            started[process.pid] = process
            answer = process.pid
        else:
            pid, *values = facts
            answer = getattr(started[pid], what)(*values)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    POPEN = subprocess.Popen
    serve()
