"""Kernels that are forks of one process, which has imported the large packages once for all notebooks.

`Kernel` takes the place of the process that jupyter_client starts. What a notebook decides by its own imports is left
to it: flashlab and Triton, which either interpret or compile, and pyplot, which asks in what it runs.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings


class Kernel:
    """As much of a subprocess.Popen as a kernel's manager asks for."""

    stdin = stdout = stderr = None
    servers: list[subprocess.Popen] = []

    def __init__(self, command, *, cwd, env, **_):
        if not self.servers:  # what Python reads as it begins, and packages as they are imported, is the same for all
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            server = subprocess.Popen([sys.executable, __file__], env=env, start_new_session=True, **pipes)
            self.servers.append(server)  # it ends with this process, whose pipe it reads
        (server,) = self.servers
        print(json.dumps([command[command.index("-m") + 1 :], cwd, env]), file=server.stdin, flush=True)
        self.pid = int(server.stdout.readline())

    def poll(self):
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return 1
        return None

    def wait(self):
        while self.poll() is None:
            time.sleep(0.01)
        return 1

    def send_signal(self, number):
        os.kill(self.pid, number)


def second_try(start):
    """nbval's start_new_kernel: a kernel that says nothing is begun anew, once, with a warning. One in some hundreds
    did so; why is not known. (Two processes may have chosen one port.)
    """

    def begin(startup_timeout=60, *given, **named):
        try:
            return start(startup_timeout / 3, *given, **named)
        except RuntimeError as error:
            warnings.warn(f"a kernel is begun anew: {error}", stacklevel=2)
            return start(startup_timeout, *given, **named)

    return begin


def serve():
    import ipykernel.kernelapp  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import torch  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        (module, *arguments), folder, variables = json.loads(line)
        pid = os.fork()
        if pid:
            os.setpgid(pid, pid)  # a signal to the kernel's group is one to what it has started, and to nobody else
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables, JPY_PARENT_PID=str(os.getppid()))
        sys.argv, sys.path[0] = [module, *arguments], folder
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve()
