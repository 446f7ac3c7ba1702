"""Set up `.venv`, then run its Python with the arguments given, if any but `setup`: what every make target calls.

Standard library only: it runs before anything is installed. The environment is ready when the stamp in it, written
last, says the same pyproject.toml, Python and course folder as now. A mark is written first, and outlives a clearing:
what was cut short is made afresh. Only a folder that is stamped or marked is cleared, of what an environment holds;
and one that is marked only if it holds an environment (its pyvenv.cfg goes last), or no file where one would have them.

    PYTHON   the interpreter to build from (tools/bootstrap.sh picks one)
    VENV     the environment's folder, default `.venv`; `none` uses the interpreter as it is and installs nothing
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = "{}.{}".format(*sys.version_info[:2])
ASKED = VERSION if os.environ.get("PYTHON") else None  # then an environment of another version does not do
SIZES = "3 GB, or 12 GB with the CUDA build of torch"
MAKE_VENV = ["-m", "venv"]
PIP = ["-m", "pip", "install", "--no-input", "--progress-bar", "off"]
PROBE = ["-c", "import flashlab, torch, triton, numpy, jupyterlab, pytest, ruff"]
VENV_HOLDS = ("bin", "etc", "include", "lib", "lib64", "man", "share", ".gitignore", ".lock", "pyvenv.cfg")
LEADS_ASTRAY = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON", "UV_SYSTEM_PYTHON")
VARIABLES = {name: value for name, value in os.environ.items() if name not in LEADS_ASTRAY}
VARIABLES |= {"PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


class Stop(Exception):
    """Something is missing; the message is one sentence for the learner, saying what to do."""


def missing() -> list[str]:
    """One sentence for each thing that this machine lacks for a new environment."""
    found, free = [], shutil.disk_usage(ROOT).free / 1e9
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        found.append(f"python{VERSION} cannot make virtual environments: install python{VERSION}-venv or the like.")
    if not any(map(shutil.which, (os.environ.get("CXX") or "g++", "g++", "c++"))):
        found.append("there is no C++ compiler (g++): install one (apt install g++, dnf install gcc-c++).")
    if free < 3:
        found.append(f"only {free:.1f} GB are free on the disk of {ROOT}, and the set-up takes {SIZES}: free some.")
    return found


def explain(log: str) -> str:
    """One sentence on why pip, or uv, failed, from what it printed."""
    if "No space left on device" in log:
        return f"the disk is full: the set-up takes {SIZES}; where /tmp is the small one, set TMPDIR to another folder."
    if re.search("CERTIFICATE_VERIFY_FAILED|SSLError|invalid peer certificate", log):
        return "the package index's certificate was refused: behind a proxy, name its own with PIP_CERT=/path/ca.pem."
    unreachable = "NewConnection|NameResolution|failure in name|dns error|Failed to establish|timed out|ReadTimeout"
    unreachable += "|ProxyError|Max retries exceeded|unreachable|Connection broken|error sending request"
    if re.search(unreachable, log, re.I) or "found for setuptools" in log:  # every index has that one
        return "the package index cannot be reached: check the network (https_proxy, PIP_INDEX_URL) and try again."
    errors = re.findall(r"^\s*(?:\w*Error: |ERROR: |error: |╰─▶ )(.+)$", log, re.M) or ["pip does not say why"]
    return f"no set-up with Python {VERSION} on {os.uname().machine}: {errors[-1].strip().rstrip('.')}."


class Environment:
    """The virtual environment at `folder`, made or repaired by `ready()`."""

    def __init__(self, folder: Path):
        self.folder, self.log = folder.resolve(), ROOT / ".flashlab" / "setup.log"
        self.python, self.stamp = self.folder / "bin" / "python", self.folder / "flashlab-ready.json"
        self.begun = self.folder / "flashlab-setup-begun"

    def version(self) -> str | None:
        """ "3.11", or None where its Python does not run, or runs as the base's for want of a pyvenv.cfg."""
        ask = [self.python, "-c", "import sys; print(sys.prefix); print('%d.%d' % sys.version_info[:2])"]
        try:
            prefix, version = subprocess.run(ask, capture_output=True, text=True, env=VARIABLES).stdout.splitlines()
        except (OSError, ValueError):
            return None
        return version if Path(prefix).resolve() == self.folder else None

    def fingerprint(self) -> bytes:
        pins = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
        return json.dumps({"pyproject": pins, "python": self.version(), "folder": str(ROOT)}).encode()

    def why_afresh(self) -> str | None:
        """Why it has to be made from nothing, None where one can build on it. Stop where the folder is not ours."""
        if files := [place for place in (self.folder, *self.folder.parents) if place.exists() and not place.is_dir()]:
            raise Stop(f"{files[0]} is a file, and the environment needs a folder: say VENV=/another, or VENV=none.")
        if not self.folder.exists() or not os.listdir(self.folder):
            return "there is none yet"
        if self.begun.exists():
            others = [name for name in VENV_HOLDS if not name.startswith(".") and self.files(name)]
            if others and "pyvenv.cfg" not in others:
                raise Stop(
                    f"{self.folder} has the mark of a set-up that was cut short, and no environment: move away its "
                    f"{', '.join(others)}, or delete {self.begun.name} and say VENV=/another."
                )
            return "an earlier set-up was cut short"
        if not self.stamp.exists():
            raise Stop(f"{self.folder} was not made by this set-up: move it away, or say VENV=/another, or VENV=none.")
        if self.version() is None or json.dumps(str(ROOT)).encode() not in self.stamp.read_bytes():
            return "it was moved or copied, or its Python does not run"
        return None if ASKED in (None, self.version()) else f"it is of Python {self.version()}"

    def files(self, name: str) -> bool:
        """Whether there is a file of this name, or one in the folder of this name; a link is not followed."""
        path = self.folder / name
        return any(files for _, _, files in os.walk(path)) if path.is_dir() else os.path.lexists(path)

    def is_ready(self) -> bool:
        whole = self.stamp.exists() and not self.begun.exists() and self.stamp.read_bytes() == self.fingerprint()
        return whole and ASKED in (None, self.version())

    def ready(self) -> None:
        """Make or repair the environment, one set-up at a time; raises Stop with one sentence where it cannot."""
        lock = os.open(ROOT, os.O_RDONLY)  # pip holds it too, should it outlive this process
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another set-up of the same folder", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a disk that cannot lock
            pass
        if not self.is_ready():  # another one may have made it meanwhile
            self.make(lock)
        os.close(lock)

    def make(self, lock: int) -> None:
        why = self.why_afresh()
        if why and (lacks := missing()):
            raise Stop("\n         ".join(lacks))
        goes = ", ".join(name for name in VENV_HOLDS if os.path.lexists(self.folder / name)) if why else ""
        print(f"making {self.folder}: {why}" if why else f"bringing {self.folder} up to date", flush=True)
        if goes:
            print(f"clearing it of {goes}", flush=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log.parent.mkdir(exist_ok=True)
        self.begun.touch()
        if why:  # by the base's Python: this one may lie in the folder that is cleared
            self.clear()
            self.run([os.path.realpath(sys.executable), *MAKE_VENV, self.folder], lock)
        self.check()
        try:
            self.run([*(self.uv() or [self.python, *PIP]), "--editable", ROOT], lock)
        except Stop:
            if not why and not re.search("Installing collected|Prepared|Uninstalled|Installed", self.said):
                self.begun.unlink()  # nothing was touched: what was there works as before
            raise
        self.run([self.python, *PROBE], lock)
        self.check()
        self.stamp.write_bytes(self.fingerprint())
        self.begun.unlink()

    def clear(self) -> None:
        """Delete what an environment holds, the stamp first. What else lies there stays, and so does the mark."""
        for path in (self.stamp, *(self.folder / name for name in VENV_HOLDS)):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)

    def check(self) -> None:
        if self.version() is None:  # its Python would be the base's
            raise Stop(f"no environment could be made in {self.folder}: delete the folder and try again.")

    def uv(self) -> list[str | Path]:
        """uv, which is faster, with the indexes that pip is told of; nothing where it is not installed."""
        ask = [self.python, "-m", "pip", "config", "list"]  # the environment's variables come first
        told, uv = subprocess.run(ask, capture_output=True, text=True, env=VARIABLES).stdout, shutil.which("uv")
        if uv is None or ".no-index=" in told:
            return []
        words = [uv, "pip", "install", "--python", self.python, "--index-strategy", "unsafe-best-match"]
        for key, flag in {"index-url": "--default-index", "extra-index-url": "--index", "find-links": "-f"}.items():
            for places in re.findall(rf"^\S*\.{key}='(.*)'$", told, re.M)[:1]:
                words += [word for place in re.split(r"\s+|\\n", places) if place for word in (flag, place)]
        return words

    def run(self, command: list[str | Path], lock: int) -> None:
        """Run a step of the set-up, its words to the log and the latest of them to a terminal; Stop if it fails."""
        width = shutil.get_terminal_size().columns - 1 if sys.stdout.isatty() else 0
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.said = ""
        with open(self.log, "a") as log, subprocess.Popen(command, env=VARIABLES, pass_fds=[lock], **pipe) as process:
            for line in process.stdout:
                self.said += line
                log.write(line)
                print(f"  {line.strip()}"[:width].ljust(width), end="\r" if width else "", flush=True)
        if process.returncode:
            raise Stop(f"{explain(self.said)}\n         (all that was said: {self.log})")


def main(*arguments: str) -> None:
    """Set up where needed and become that Python. The doctor has to work where the set-up does not."""
    place, python, variables = os.environ.get("VENV") or ".venv", Path(sys.executable), dict(os.environ)
    if place != "none":
        environment = Environment(ROOT / place)
        if not (arguments and arguments[0].endswith("doctor.py")) and not environment.is_ready():
            environment.ready()
        if environment.version():
            python, path = environment.python, f"{environment.python.parent}:{os.environ.get('PATH', os.defpath)}"
            variables = {**VARIABLES, "VIRTUAL_ENV": str(environment.folder), "PATH": path}
    if arguments in ((), ("setup",)):
        print(f"ready: {python}")
    else:
        os.chdir(ROOT)
        os.execve(python, [python, *arguments], variables)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Stop as stop:
        sys.exit(f"stopped: {stop}")
    except OSError as error:
        sys.exit(f"stopped: {error.strerror} ({error.filename}): the set-up needs a disk that it can write to.")
    except KeyboardInterrupt:
        sys.exit("\nstopped by you; the next run begins the set-up afresh.")
