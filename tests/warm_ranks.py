"""Programs of this repository without the seconds for which each of them would import.

A helper process imports PyTorch, DeepSpeed and the like once; for every program it forks. What it
has forked is set up as a fresh interpreter is: environment, folder, command line, search path,
signals, output. It understands `python FILE`, `python -m MODULE` and `accelerate launch`. Ranks
have the environment that Accelerate's and PyTorch's own launchers work out, and over them stands a
process in the launcher's place: it waits, and ends the others when one has failed.

What a fresh interpreter has and these do not: modules that are not there before they are imported,
another order of sets in every process, and their environment in /proc. Nor is there anything that a
launcher says. Where that is what a test is about, the launch must be a real one.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LAUNCHER = "accelerate.commands.launch"
# What the programs import, at once or on the way, as far as it takes time.
MODULES = (
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.profiler"),
    *("torch.distributed.run", "torch.utils.tensorboard", "torch.utils.cpp_extension"),
    *("accelerate", LAUNCHER, "transformers", "transformers.integrations.deepspeed"),
    *("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer"),
    *("deepspeed.module_inject.auto_ep_layer", "deepspeed.ops.op_builder.all_ops"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg", "numpy.ctypeslib"),
)
PROGRAMS = ("train_pretrain_accelerate", "scripts.evaluate", "scripts.prepare_data")
# Safety nets. A launcher waits so long for ranks to follow SIGTERM.
PATIENCE_SECONDS = 30
GONE = -signal.SIGKILL


class WarmProcess:
    """A program that the helper has started, to be used as a subprocess.Popen is.

    `pid` is the process of `python ...`, or what stands in the launcher's place; `ranks` has the
    processes that run the script.

    Args:
        channel: a descriptor, by which the helper tells how it goes; closing it ends the program.
    """

    def __init__(self, channel: int):
        self._channel, self._received = channel, b""
        self.returncode: int | None = None
        self.pid, self.ranks = 0, []
        while not self.ranks and self.returncode is None:
            self._receive()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        while self.returncode is None and select.select([self._channel], [], [], 0)[0]:
            self._receive()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if end is None else max(0, end - time.monotonic())
            if not select.select([self._channel], [], [], left)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self._receive()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and that is not known yet
                os.kill(self.pid, number)

    def abandon(self) -> None:
        """End all of its processes."""
        if self._channel is not None:
            os.close(self._channel)
            self._channel = None
        self.returncode = GONE if self.returncode is None else self.returncode

    __del__ = abandon

    def _receive(self) -> None:
        """Take in what is known by now; waits until there is anything."""
        try:
            chunk = os.read(self._channel, 1 << 16)
        except ConnectionError:
            chunk = b""
        if not chunk:  # killed, and with it what would have told
            self.returncode = GONE if self.returncode is None else self.returncode
        *lines, self._received = (self._received + chunk).split(b"\n")
        for line in lines:
            vars(self).update(json.loads(line))


class Helper:
    """The process that forks, from here on until this one ends.

    Args:
        before: a command line that starts it elsewhere, such as in other namespaces.
    """

    def __init__(self, before: tuple[str, ...] = ()):
        self._control, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 it stays open as long as the helper
        environ = without_launcher(os.environ)
        environ.pop("PYTHONPATH", None)  # every program may have its own
        # NumPy would start its threads at once, and what has threads must not be forked.
        environ["OPENBLAS_NUM_THREADS"] = "1"
        self._process = subprocess.Popen(
            [*before, sys.executable, __file__, str(theirs.fileno())],
            env=environ,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C at the tests' terminal is theirs
        )
        theirs.close()
        atexit.register(self.close)

    def start(self, command: list[str], cwd: Path, environ: dict[str, str], output) -> WarmProcess:
        """
        Args:
            command: begins with this interpreter.
            output: an open file, for stdout and stderr.
        """
        assert command[0] == sys.executable
        ours, theirs = socket.socketpair()
        request = {"command": command[1:], "cwd": str(cwd), "environ": environ}
        with suppress(ConnectionError):
            socket.send_fds(self._control, [b"!"], [theirs.fileno(), output.fileno()])
            theirs.close()
            ours.sendall(json.dumps(request).encode() + b"\n")
            started = WarmProcess(ours.detach())
            if started.ranks or started.returncode != GONE:
                return started
        self._log.seek(0)
        raise RuntimeError(f"nothing was started; the helper said: {self._log.read().decode()}")

    def close(self) -> None:
        self._control.close()
        self._process.wait()


@functools.cache
def helper() -> Helper:
    """The one of this test session."""
    return Helper()


def without_launcher(environ: dict[str, str]) -> dict[str, str]:
    """An environment without a GPU and what a launcher may have left in it."""
    clean = {k: v for k, v in environ.items() if not k.startswith(("ACCELERATE_", "TORCHELASTIC"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        clean.pop(name, None)
    return clean | {"CUDA_VISIBLE_DEVICES": ""}


# From here on: what runs in the helper, and in what it forks.


@dataclass
class Program:
    """What a process is to become."""

    command: list[str]  # behind "python"
    environ: dict[str, str]
    search: list[str]  # a fresh interpreter's sys.path, but for its first entries
    address: int | None = None  # of a rank: where to read what its environment has besides

    def run(self) -> None:
        """As if this process had just been started with it."""
        if self.address is not None:
            with open(self.address, "rb") as pipe:
                self.environ |= json.loads(pipe.read())
        take_environment(self.environ)
        import numpy as np
        import torch

        np.random.seed()
        torch.default_generator.seed()
        if threads := self.environ.get("OMP_NUM_THREADS"):  # the library has read it long ago
            torch.set_num_threads(int(threads))
        words = list(self.command)
        if words[0] == "-u":
            sys.stdout.reconfigure(line_buffering=True)
            del words[0]
        is_module = words[0] == "-m"
        if is_module:
            del words[0]
        name, sys.argv = words[0], words
        first = os.getcwd() if is_module else str(Path(name).resolve().parent)
        more = self.environ.get("PYTHONPATH", "")
        others = [*filter(None, more.split(os.pathsep)), *self.search]
        sys.path[:] = [first, *dict.fromkeys(others)]
        importlib.invalidate_caches()
        if is_module:
            sys.argv[0] = importlib.util.find_spec(name).origin
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")


def take_environment(environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)


def serve(control: socket.socket) -> Program | None:
    """Fork for every request. Returns in a process that has been forked, with what it has to run,
    and in the helper when nobody can ask any more."""
    search = import_everything()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what is forked here
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
            return None
        if os.fork() == 0:
            control.close()
            return supervise(*descriptors, search)
        for descriptor in descriptors:
            os.close(descriptor)


def import_everything() -> list[str]:
    """Import and do nothing else; returns the search path without this file's folder."""
    search = sys.path[1:]
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    for name in (*MODULES, *PROGRAMS):
        importlib.import_module(name)
    for name in PROGRAMS:  # a program that is started is not a module yet
        del sys.modules[name]
    threads, end = Path("/proc/self/task"), time.monotonic() + PATIENCE_SECONDS
    while threads.exists() and len(list(threads.iterdir())) > 1:  # matplotlib's, making its cache
        if time.monotonic() > end:
            raise SystemExit("an import has started threads that stay: this must not be forked")
        time.sleep(0.1)
    gc.collect()
    gc.freeze()
    return search


def supervise(channel: int, output: int, search: list[str]) -> Program:
    """Start what is asked for and report its end; returns only in what has been started."""
    client = socket.socket(fileno=channel)
    with client.makefile("rb") as file:
        request = json.loads(file.readline())
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    fresh_signals()
    os.chdir(request["cwd"])
    command, environ, processes = request["command"], request["environ"], 1
    launched = command[:2] == ["-m", LAUNCHER]
    if launched:
        answer = ask_the_launcher(command[2:], environ)
        if isinstance(answer, int):
            tell(client, returncode=answer)
            os._exit(0)
        command, environ, processes = answer["command"], answer["environ"], answer["processes"]

    ranks, pipes = [], []
    for rank in range(processes):
        program = Program(command, environ, search)
        if launched:
            program.address, write = os.pipe()
            program.environ = environ | rank_environment(rank, processes)
        ranks.append(os.fork())
        if ranks[-1] == 0:
            for descriptor in (channel, *pipes, *([write] if launched else [])):
                os.close(descriptor)
            client.detach()
            return program
        if launched:
            os.close(program.address)
            pipes.append(write)
    if launched:  # only now: it has threads
        store = open_store()
        for pipe in pipes:
            os.write(pipe, json.dumps({"MASTER_PORT": str(store.port)}).encode())
            os.close(pipe)
    tell(client, pid=os.getpid() if launched else ranks[0], ranks=ranks)
    codes = wait_for_all(set(ranks), client)
    if launched:
        tell(client, returncode=int(any(codes)))
    else:
        tell(client, returncode=codes[0])
    os._exit(0)


def tell(client: socket.socket, **facts) -> None:
    try:
        client.sendall(json.dumps(facts).encode() + b"\n")
    except OSError:  # nobody listens any more
        os._exit(1)


def fresh_signals() -> None:
    """As Python sets them when it starts."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def ask_the_launcher(flags: list[str], environ: dict[str, str]) -> dict | int:
    """What `accelerate launch` would start, by its own code and torchrun's, up to where that starts
    processes; the exit code if it would not. In a process of its own: it leaves traces."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        from accelerate.commands import launch
        from torch.distributed import run

        def start(config, entrypoint: str):
            def with_arguments(*command: str):
                answer = {"command": command, "processes": config.nproc_per_node}
                signals = {"TORCHELASTIC_SIGNALS_TO_HANDLE": config.signals_to_handle}
                answer["environ"] = dict(os.environ) | signals
                os.write(write, json.dumps(answer).encode())
                os._exit(0)

            return with_arguments

        run.elastic_launch = start
        take_environment(environ)
        if "--multi_gpu" not in flags:  # the launcher imports it, which leaves this behind
            os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        code = 1
        try:
            launch.launch_command(launch.launch_command_parser().parse_args(flags))
        except SystemExit as exit:
            code = exit.code
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    os.close(write)
    with open(read, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(answer) if answer else os.waitstatus_to_exitcode(status)


def rank_environment(rank: int, processes: int) -> dict[str, str]:
    """As torchrun's agent sets it; test_warm_ranks.py compares them."""
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(processes)),
        **{"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default"},
        **{"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"},
        **{"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"},
        **{"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "MASTER_ADDR": "127.0.0.1"},
    }


def open_store():
    """Where the ranks meet, at a port that nobody else has."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def wait_for_all(ranks: set[int], client: socket.socket) -> list[int]:
    """The exit codes of the processes. When one fails the others are ended, as a launcher does;
    when the client is gone, all."""
    codes, deadline = {}, None
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            ranks.remove(pid)
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid] and deadline is None:
                deadline = time.monotonic() + PATIENCE_SECONDS
                end(ranks, signal.SIGTERM)
        elif select.select([client], [], [], 0.01)[0]:
            end(ranks, signal.SIGKILL)
            time.sleep(0.01)
        elif deadline is not None and time.monotonic() > deadline:
            end(ranks, signal.SIGKILL)
    return list(codes.values())


def end(processes: set[int], number: int) -> None:
    for pid in processes:
        os.kill(pid, number)


if __name__ == "__main__":
    program = serve(socket.socket(fileno=int(sys.argv[1])))
    if program is not None:
        program.run()
