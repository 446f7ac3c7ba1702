"""The process in which a module's code runs, and the talk with it.

A source may do anything: follow a null pointer in its host part, call ``exit()``, never return, destroy the heap.
So each library is loaded into a small process of its own (runtime/runner.cpp, runtime/serve.cpp). It lives from one
call to the next, so that ``__device__`` variables keep their values, and ends with a call that did not return.
"""

import atexit
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashlab.simt.errors import HostError, KernelTimeout, SimtError

PATIENCE = 2.0  # seconds of work that a cancelled call has to end by itself
REPORT = 60.0  # and one that has returned, to say what came of it
POLL = 0.5  # seconds between two looks at a call
PRINTED = 1 << 20  # bytes that are kept of what a call prints, as a GPU's buffer has
ALIVE = 32  # processes that wait for a next call; beyond that the one that has waited longest ends


@dataclass
class Ending:
    """How a call ended.

    kind: "returned"; "exit", "assert", "exception", "device-call" and "signal" of the host part; "stuck" (it did not
    end when it was told to); "killed" (the process is gone, and could not say why).
    """

    kind: str
    code: int = 0  # of exit(), or the signal's number
    host: bool = True  # it happened in the host part's thread
    stack: bool = False  # a SIGSEGV just beyond the thread's stack
    address: int = 0  # that the signal was about
    pcs: tuple[int, ...] = ()  # where, innermost first, in the module; 0 is elsewhere
    text: str = ""  # of an assertion or an exception, or the last of what the process wrote to stderr


@dataclass
class Reply:
    """What came of a call: its end, value and CUDA error, and the runtime's records (see narrator.py)."""

    ending: Ending
    returned: int = 0
    error: int = 0
    records: str = ""
    findings: str = ""
    printed: str = ""
    complained: str = ""  # on stderr
    cancelled: int = 0  # 1: it took too long; 2: the user interrupted it
    interrupt: BaseException | None = field(default=None, repr=False)


class Gone(Exception):
    """The process has ended; ``args[0]`` is its exit status, ``args[1]`` what it wrote to stderr."""


class _Work:
    """How long a process has been at work: the time that others keep the processors from it does not count.

    A machine that is busy with other things makes a right kernel slow; it shall not make it fail. So of the time
    between two looks counts what the busiest thread of the process has computed; and all of it, where they all sleep.
    But a quarter counts in any case: where there are more threads than processors, they keep each other waiting.
    """

    def __init__(self, pid: int):
        self._tasks = Path(f"/proc/{pid}/task")
        self._tick = 1 / os.sysconf("SC_CLK_TCK")
        self._last = time.monotonic()
        self._ticks = self._look()[0]
        self._seconds = 0.0

    def _look(self) -> tuple[dict[str, int], bool]:
        """Of each thread what it has computed, in ticks; and whether one of them wants to."""
        ticks, awake = {}, False
        with contextlib.suppress(OSError):  # the process is gone, or the system does not say
            for task in self._tasks.iterdir():
                with contextlib.suppress(OSError):
                    fields = (task / "stat").read_text(errors="replace").rpartition(")")[2].split()
                    ticks[task.name] = int(fields[11]) + int(fields[12])
                    awake |= fields[0] in "RD"
        return ticks, awake

    def seconds(self) -> float:
        """Since it was made."""
        now, (ticks, awake) = time.monotonic(), self._look()
        passed, self._last = now - self._last, now
        if awake:
            busiest = max(n - self._ticks.get(thread, 0) for thread, n in ticks.items())
            passed = min(passed, max(busiest * self._tick, passed / 4))
        self._ticks = ticks
        self._seconds += passed
        return self._seconds


class Process:
    """A library in a process: `runner` loads it, and gets `description` first (``describe`` of serve.cpp).

    watch: as in :meth:`call`, of the time that it takes to load: constructors of global variables run then. Raises
    SimtError: it cannot be started or loaded; KernelTimeout: the time was up before; HostError: it ended as it was
    loaded.
    """

    def __init__(self, runner: Path, library: Path, description: str, watch: Callable[[float, float], float]):
        self.owner = os.getpid()
        self.lock = threading.Lock()  # one call at a time
        self._between_calls = True
        mine, its = socket.socketpair()
        self._socket = mine
        try:
            self._popen = subprocess.Popen(
                [str(runner), str(library), str(its.fileno()), str(self.owner)],
                pass_fds=(its.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C in the terminal is for Python alone
            )
        except OSError as error:
            mine.close()
            raise SimtError(f"the emulator's process cannot be started: {error}") from error
        finally:
            its.close()
        assert self._popen.stdout is not None and self._popen.stderr is not None, "the child was started with pipes"
        self._out, self._err = self._popen.stdout, self._popen.stderr
        for pipe in (self._out, self._err):
            os.set_blocking(pipe.fileno(), False)
        self._unread = bytearray()
        self._texts = {self._out: bytearray(), self._err: bytearray()}
        self._lost = 0
        hello: dict[str, bytes] = {}
        try:
            self._watched(watch, {"hello"}, hello)
            if not hello:
                raise KernelTimeout(
                    "the module was still being loaded when the time was up: the constructor of a global variable "
                    "does not end, or has too much to do"
                )
        except Gone as gone:
            self.close()
            status, said = gone.args
            if status == 3:
                raise SimtError(f"the emulator's process does not start: {said}") from None
            how = f"signal {-status}" if status and status < 0 else f"exit status {status}"
            raise HostError(
                f"the module's process ended as it was loaded, in the constructor of a global variable ({how})"
                f"{': ' if said else ''}{said}"
            ) from None
        except BaseException:
            self.close()
            raise
        self.fiber_kind = hello["hello"].decode()
        self._send(description.encode())

    # ---- frames ----------------------------------------------------------------------------------
    def _send(self, text: bytes, file: int | None = None) -> None:
        frame = len(text).to_bytes(8, sys.byteorder) + text
        with contextlib.suppress(OSError):  # it is gone: found out at the next read
            sent = 0 if file is None else socket.send_fds(self._socket, [frame], [file])
            self._socket.sendall(frame[sent:])

    def _frames(self):
        while len(self._unread) >= 8:
            length = int.from_bytes(self._unread[:8], sys.byteorder)
            if len(self._unread) < 8 + length:
                return
            frame = bytes(self._unread[8 : 8 + length])
            del self._unread[: 8 + length]
            name, _, data = frame.partition(b"\n")
            yield name.decode(), data

    def _drain(self, pipe) -> bool:
        """Takes what is in a pipe; False when it has been closed."""
        while True:
            try:
                data = os.read(pipe.fileno(), 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            text = self._texts[pipe]
            room = PRINTED - len(text)
            text += data[:room]
            self._lost += len(data) - max(0, min(room, len(data)))
            if len(data) < 1 << 16:
                return True

    def _wait(self, deadline: float, last: set[str], frames: dict[str, bytes]) -> None:
        """Reads frames until one of ``last`` is there, or the time is up. Raises Gone: the process has ended."""
        watched: list[Any] = [self._socket, self._out, self._err]
        while not last & frames.keys():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            ready, _, _ = select.select(watched, [], [], left)
            for source in ready:
                if source is not self._socket:
                    if not self._drain(source):
                        watched.remove(source)
                    continue
                try:
                    data = source.recv(1 << 16)
                except ConnectionError:
                    data = b""
                if not data:
                    raise self._gone()
                self._unread += data
                frames.update(self._frames())

    def _gone(self) -> Gone:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(1)
        for pipe in (self._out, self._err):
            self._drain(pipe)
        return Gone(self._popen.returncode, self._texts[self._err].decode(errors="replace").strip())

    def _wait_for_work(self, seconds: float, last: set[str], frames: dict[str, bytes]) -> None:
        """The same, with a limit on the time that the process is at work."""
        self._watched(lambda _, worked: seconds - worked, last, frames)

    def _watched(self, watch: Callable[[float, float], float], last: set[str], frames: dict[str, bytes]) -> bool:
        """The same until ``watch`` says that it is enough; whether it was."""
        begin, work = time.monotonic(), _Work(self._popen.pid)
        while not last & frames.keys():
            left = watch(time.monotonic() - begin, work.seconds())
            if left <= 0:
                return True
            self._wait(time.monotonic() + min(left, POLL), last, frames)
        return False

    # ---- a call ----------------------------------------------------------------------------------
    def call(self, request: str, file: int, watch: Callable[[float, float], float]) -> Reply:
        """Runs an entry; where it is cancelled by an exception of this thread (Ctrl-C), that is the reply's
        ``interrupt``.

        request: as serve.cpp reads it. file: descriptor of the shared memory. watch: called twice a second and more
        with the seconds that have gone by, and those of them in which the process was at work; returns in how many the
        call is to be cancelled, at the earliest.
        """
        self._between_calls = False
        for text in self._texts.values():
            text.clear()
        self._lost = 0
        frames: dict[str, bytes] = {}
        cancelled, interrupt, came_back = 0, None, False
        try:
            try:
                self._send(request.encode(), file)
                cancelled = int(self._watched(watch, {"ending", "refused"}, frames))
            except KeyboardInterrupt as error:
                cancelled, interrupt = 2, error
            if cancelled:
                with contextlib.suppress(OSError):
                    self._socket.sendall(bytes([cancelled]))
                self._wait_for_work(PATIENCE, {"ending", "refused"}, frames)
            # After the ending comes the report, unless the heap is so broken that it cannot be written.
            came_back = frames.get("ending", b"").startswith(b"returned\t")
            self._wait_for_work(REPORT if came_back else PATIENCE, {"end", "refused"}, frames)
            ending = None
        except Gone as gone:
            status = gone.args[0]
            ending = Ending("killed", -status if status is not None and status < 0 else 0, text=gone.args[1])
        except KeyboardInterrupt as error:  # a second one: no patience
            cancelled, interrupt, ending = 2, error, Ending("killed", int(signal.SIGKILL))
        if "ending" in frames and ("end" in frames or not came_back):
            ending = _ending(frames["ending"])
        elif "refused" in frames:
            ending = Ending("refused", text=frames["refused"].decode())
        elif ending is None:
            ending = Ending("stuck")
        # One that was cancelled as it ended may find the word of it when it waits for the next call.
        over = ending.kind in ("returned", "refused") and not cancelled
        if not over:
            self._kill()
        for pipe in (self._out, self._err):
            self._drain(pipe)
        if not over:
            self.close()
        printed, complained = (t.decode(errors="replace") for t in self._texts.values())
        if self._lost:
            printed += f"\n... and {self._lost} more bytes\n"
        returned, _, failed = frames.get("returned", b"0\t0").decode().partition("\t")
        records, findings = (frames.get(n, b"").decode(errors="replace") for n in ("records", "findings"))
        self._between_calls = over
        return Reply(ending, int(returned), int(failed), records, findings, printed, complained, cancelled, interrupt)

    # ---- its end ---------------------------------------------------------------------------------
    @property
    def alive(self) -> bool:
        """It can take a call."""
        mine = self.owner == os.getpid() and self._socket.fileno() >= 0
        return mine and self._between_calls and self._popen.poll() is None

    def _kill(self) -> None:
        if self._popen.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._popen.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(5)

    def close(self) -> None:
        """Ends the process, with all that it has started."""
        self._socket.close()
        if self.owner == os.getpid():
            self._kill()
        for pipe in (self._out, self._err):
            pipe.close()


def _ending(frame: bytes) -> Ending:
    kind, code, host, stack, address, pcs, text = frame.decode(errors="replace").split("\t", 6)
    places = tuple(int(pc) for pc in pcs.split())
    return Ending(kind, int(code), host == "1", stack == "1", int(address), places, text)


_processes: OrderedDict[str, Process] = OrderedDict()
_lock = threading.Lock()


@contextlib.contextmanager
def process(runner: Path, library: Path, description: str, watch: Callable[[float, float], float]):
    """The process of a library, for one call; a new one where there is none, or it has ended: see `Process`."""
    key = str(library)
    while True:
        with _lock:
            wanted = _processes.pop(key, None)
            if wanted is not None and wanted.lock.acquire(blocking=False):  # else another thread's call is under way
                usable = wanted.alive
                wanted.lock.release()
                if not usable:
                    wanted.close()
                    wanted = None
            _processes[key] = wanted = wanted or Process(runner, library, description, watch)
        with wanted.lock:
            if wanted.alive:
                yield wanted
                break
    with _lock:
        for other in list(_processes)[: max(0, len(_processes) - ALIVE)]:
            if _processes[other].lock.acquire(blocking=False):  # and held: its next call may be about to begin
                ended = _processes.pop(other)
                ended.close()
                ended.lock.release()


@atexit.register
def _close_all() -> None:
    for p in _processes.values():
        p.close()


def _forget_all() -> None:  # in a forked child: they are the parent's
    global _lock
    _lock = threading.Lock()
    for p in _processes.values():
        p._socket.close()
    _processes.clear()


os.register_at_fork(after_in_child=_forget_all)
