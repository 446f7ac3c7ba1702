"""Set up `.venv` and run something in it: what `make lab`, `make test` and the other targets call.

    sh tools/bootstrap.sh setup | lab [jupyter options] | test [parts] | build [options] | doctor [--json]
                          python [arguments]

Standard library only: it runs before anything is installed. The environment counts as ready when the stamp, written
last, says the same pyproject.toml, Python version and folder as now; then nothing is checked again and the command
starts at once. An environment whose making was cut short (killed, power lost) still holds the `installing` mark and is
made afresh, for pip would believe a half-copied package to be installed.

    PYTHON   the interpreter to build from (tools/bootstrap.sh picks one)
    VENV     the environment's folder, default `.venv`; `none` uses the interpreter as it is and installs nothing
    PHASE    the phase at which `lab` opens, default 0
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ((3, 10), (3, 14))  # the oldest that the package, the newest that torch 2.13.0 supports
CPU_GB, CUDA_GB = (
    3,
    12,
)  # disk: the whole set-up with a CPU wheel of torch, and with the CUDA one and its libraries
STAMP, INSTALLING, LOG = "flashlab-ready.json", "flashlab-installing", "flashlab-pip.log"


class Stop(Exception):
    """Something is missing; the message is one sentence for the learner, saying what to do."""


# ---------------------------------------------------------------------------------------------- what a machine lacks


def install_command(apt: str, dnf: str, pacman: str, zypper: str) -> str:
    """The command that installs a system package here, ready to paste."""
    sudo = "" if os.geteuid() == 0 else "sudo "
    for tool, words in (
        ("apt-get", f"apt install {apt}"),
        ("dnf", f"dnf install {dnf}"),
        ("pacman", f"pacman -S {pacman}"),
        ("zypper", f"zypper install {zypper}"),
    ):
        if shutil.which(tool):
            return f"`{sudo}{words}`"
    return f"the package that your system calls {apt}, {dnf} or similar"


def find_compiler() -> str | None:
    """Path of the first C++ compiler: $CXX, g++, clang++ or c++."""
    for name in (os.environ.get("CXX") or "g++", "g++", "clang++", "c++"):
        path = shutil.which(name)
        if path:
            return path
    return None


def compiler_works(compiler: str) -> bool:
    """Whether it builds a program that uses the C++ library (a bare clang++ may lack the headers)."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <vector>\nint main() { return (int)std::vector<int>(1)[0]; }\n")
        command = [compiler, "-std=c++17", str(source), "-o", str(Path(folder, "probe"))]
        try:
            return subprocess.run(command, capture_output=True, timeout=120).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False


def missing(fresh: bool) -> list[str]:
    """One sentence for each thing that this machine lacks; `fresh` when an environment has to be made."""
    found = []
    version = sys.version_info[:2]
    if platform.system() != "Linux":
        found.append(
            "the course runs on Linux (Triton has no wheels for other systems): use WSL 2 on Windows, "
            "or a Linux container or virtual machine elsewhere."
        )
    if not PYTHONS[0] <= version <= PYTHONS[1]:
        found.append(
            f"this is Python {version[0]}.{version[1]}, and the course needs 3.{PYTHONS[0][1]} to 3.{PYTHONS[1][1]}: "
            "name another with PYTHON=/path/to/python3."
        )
    if fresh and not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        name = f"python{version[0]}.{version[1]}"
        how = install_command(f"{name}-venv", name, "python", name.replace(".", ""))
        found.append(f"{name} cannot make virtual environments (no venv or ensurepip): install it with {how}.")
    compiler = find_compiler()
    how = install_command("g++", "gcc-c++", "gcc", "gcc-c++")
    if compiler is None:
        found.append(f"there is no C++ compiler (g++ or clang++): install one with {how}.")
    elif not compiler_works(compiler):
        found.append(f"{compiler} cannot build a C++ program (its library is missing?): install g++ with {how}.")
    free = shutil.disk_usage(ROOT).free / 1e9
    if fresh and free < CPU_GB:
        found.append(
            f"only {free:.1f} GB are free on the disk of {ROOT}, and the set-up takes {CPU_GB} GB "
            f"({CUDA_GB} GB with the CUDA build of torch): free some space."
        )
    return found


def explain_pip(log: str) -> str:
    """One sentence on why pip failed, from what it printed."""
    if "No space left on device" in log:
        return (
            f"the disk is full: the set-up takes {CPU_GB} GB ({CUDA_GB} GB with the CUDA build of torch) and pip "
            f"unpacks in {tempfile.gettempdir()}: free some space, or set TMPDIR to a folder on a larger disk."
        )
    if re.search(r"CERTIFICATE_VERIFY_FAILED|SSLError|SSLCertVerificationError", log):
        return (
            "the package index's certificate was refused: behind a proxy that re-signs, name its "
            "certificate with PIP_CERT=/path/to/ca.pem."
        )
    wanted = re.search(r"No matching distribution found for ([^\s(]+)", log)
    if re.search(
        r"NewConnectionError|NameResolutionError|Temporary failure in name|Failed to establish a new connection"
        r"|ConnectTimeout|ReadTimeout|ProxyError|Max retries exceeded|Network is unreachable|Connection broken",
        log,
        re.I,
    ) or (wanted and wanted[1].startswith("setuptools")):  # every index has that one
        return "the package index cannot be reached: check the network (https_proxy, PIP_INDEX_URL) and try again."
    if wanted:
        return (
            f"the package index has no {wanted[1]} for Python {platform.python_version()} on "
            f"{platform.machine()}: the course needs an x86-64 or ARM64 Linux with glibc, and an index that has it."
        )
    errors = re.findall(r"^\s*(?:ERROR|error): (.+)$", log, re.M)
    last = errors[-1].strip().rstrip(".") if errors else "pip ended without saying why"
    return f"pip could not install the packages: {last}."


# ------------------------------------------------------------------------------------------------------- environment


def fingerprint(version: str) -> dict[str, str]:
    """What the stamp has to say for the environment to be used as it is."""
    text = (ROOT / "pyproject.toml").read_bytes()
    return {"pyproject": hashlib.sha256(text).hexdigest(), "python": version, "folder": str(ROOT)}


def clean_environment() -> dict[str, str]:
    """The caller's variables without those that would let packages from elsewhere into the environment."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    kept.update(PIP_USER="0", PIP_DISABLE_PIP_VERSION_CHECK="1")
    return kept


def python_version(python: Path) -> str | None:
    """ "3.11" for an interpreter that runs, None for a broken or missing one."""
    try:
        done = subprocess.run(
            [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            timeout=60,
            env=clean_environment(),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


class Environment:
    """The virtual environment at `folder`, made or repaired by `ready()`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.python = folder / "bin" / "python"

    def is_ready(self) -> bool:
        """Whether the stamp fits this pyproject.toml, interpreter and folder. Reads two files, starts Python once."""
        try:
            stamp = json.loads((self.folder / STAMP).read_text())
        except (OSError, ValueError):
            return False
        if (self.folder / INSTALLING).exists():
            return False
        version = python_version(self.python)
        asked = os.environ.get("PYTHON")  # asked for by name: then another version means another environment
        if asked and version != "{}.{}".format(*sys.version_info[:2]):
            return False
        return version is not None and stamp == fingerprint(version)

    def why_unusable(self) -> str | None:
        """Why what is in the folder cannot be built upon; None where it can (or where there is nothing)."""
        if not self.folder.exists():
            return None
        version = python_version(self.python)
        if version is None:
            return "its Python does not run"
        if (self.folder / INSTALLING).exists():
            return "an earlier set-up was cut short"
        if version != "{}.{}".format(*sys.version_info[:2]) and os.environ.get("PYTHON"):
            return f"it is of Python {version}"
        if not PYTHONS[0] <= tuple(int(part) for part in version.split(".")) <= PYTHONS[1]:
            return f"it is of Python {version}"
        with contextlib.suppress(OSError, ValueError, KeyError):
            if json.loads((self.folder / STAMP).read_text())["folder"] != str(ROOT):
                return "the course was moved or copied"
        probe = [self.python, "-m", "pip", "--version"]
        if subprocess.run(probe, capture_output=True, env=clean_environment()).returncode:
            return "it has no pip"
        return None

    def ready(self) -> None:
        """Make or repair the environment where needed; raises Stop with one sentence where it cannot."""
        if self.is_ready():
            return
        with locked(ROOT):
            if self.is_ready():  # another `make` did it meanwhile
                return
            start = time.time()
            reason = self.why_unusable()
            fresh = reason is not None or not self.folder.exists()
            problems = missing(fresh)
            if problems:
                raise Stop("\n         ".join(problems))
            if reason:
                say(f"making {self.folder.name} afresh: {reason}")
            elif fresh:
                say(f"making {self.folder.name} with Python {platform.python_version()}")
            else:
                say(f"bringing {self.folder.name} up to date")
            try:
                self.build(fresh)
            except PermissionError as error:
                raise Stop(f"{error.filename} cannot be written: the course's folder must belong to you.") from None
            except OSError as error:
                where = error.filename or self.folder
                raise Stop(f"{error.strerror} ({where}): the set-up needs a writable disk.") from None
            say(f"set up in {time.time() - start:.0f} s")

    def build(self, fresh: bool) -> None:
        if fresh:
            base = sys.executable
            if Path(sys.prefix).resolve() == self.folder.resolve():  # about to be cleared: use what it was made from
                base = getattr(sys, "_base_executable", None) or base
            done = subprocess.run(
                [base, "-m", "venv", "--clear", self.folder],
                capture_output=True,
                text=True,
                env=clean_environment(),
            )
            if done.returncode:
                said = (done.stderr or done.stdout).strip().splitlines() or ["it ended without saying why"]
                raise Stop(f"python -m venv failed: {said[-1].rstrip('.')}.")
        (self.folder / STAMP).unlink(missing_ok=True)
        mark = self.folder / INSTALLING
        mark.touch()
        # Pip before 22 cannot install an editable package that has a pyproject.toml only.
        version = subprocess.run(
            [self.python, "-m", "pip", "--version"], capture_output=True, text=True, env=clean_environment()
        ).stdout
        if int((re.search(r"pip (\d+)", version) or [0, "0"])[1]) < 22:
            self.pip("install", "--upgrade", "pip")
        self.pip("install", "--editable", ".")
        probe = [self.python, "-c", "import torch, numpy, jupyterlab, pytest, ruff"]
        if platform.system() == "Linux":
            probe[-1] += ", triton"
        done = subprocess.run(probe, capture_output=True, text=True, env=clean_environment())
        if done.returncode:
            raise Stop(f"the packages are installed but do not load: {done.stderr.strip().splitlines()[-1]}")
        self.quieten_jupyterlab()
        mark.unlink()
        write_atomically(self.folder / STAMP, json.dumps(fingerprint(python_version(self.python) or ""), indent=1))

    def quieten_jupyterlab(self) -> None:
        """No question about news and updates before the first lecture; a learner's own settings still win."""
        settings = self.folder / "share" / "jupyter" / "lab" / "settings"
        settings.mkdir(parents=True, exist_ok=True)
        quiet = {"fetchNews": "false", "checkForUpdates": False}
        text = json.dumps({"@jupyterlab/apputils-extension:notification": quiet}, indent=1)
        write_atomically(settings / "overrides.json", text)

    def pip(self, *arguments: str) -> None:
        """Run pip, its words to a log and a line of progress to the screen; Stop with one sentence if it fails."""
        command = [self.python, "-m", "pip", *arguments, "--no-input", "--progress-bar", "off"]
        log = self.folder / LOG
        lines: list[str] = []
        with open(log, "w") as file, Progress() as progress:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=clean_environment(),
            )
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    file.write(line)
                    lines.append(line)
                    progress.line(line)
            finally:  # an interrupt stops pip too; the `installing` mark stays
                if process.stdout and not process.stdout.closed:
                    process.stdout.close()
                process.wait()
        said = "".join(lines)
        if process.returncode:
            if "Installing collected packages" not in said:  # it stopped before touching anything: nothing to repair
                (self.folder / INSTALLING).unlink(missing_ok=True)
            raise Stop(f"{explain_pip(said)}\n         (all that pip said: {log})")


class Progress:
    """What pip is doing, on one line that is redrawn on a terminal, or a few lines in a log."""

    def __init__(self) -> None:
        self.start, self.packages, self.doing = time.time(), 0, "asking the package index"
        self.live = sys.stdout.isatty()
        self.ended = threading.Event()

    def line(self, text: str) -> None:
        text = text.strip()
        if text.startswith("Collecting "):
            self.packages += 1
            self.doing = text.split(" (from")[0].lower()
        elif text.startswith("Downloading ") or text.startswith("Processing "):
            self.doing = re.sub(r"^Downloading \S*/", "Downloading ", text)
            size = re.search(r"\(([\d.]+) [MG]B\)$", text)
            if size and not self.live and (text.endswith("GB)") or float(size[1]) >= 50):
                say(f"  {self.doing}")
        elif text.startswith("Installing collected packages"):
            count = text.count(",") + 1
            self.doing = f"installing {count} package{'s' if count > 1 else ''}"
            if not self.live:
                say(f"  {self.doing}")

    def draw(self) -> None:
        while not self.ended.wait(0.5):
            words = f"  {time.time() - self.start:4.0f} s  {self.packages} packages, {self.doing}"
            width = shutil.get_terminal_size().columns - 1
            print("\r" + words[:width].ljust(width), end="", flush=True)

    def __enter__(self) -> Progress:
        self.thread = threading.Thread(target=self.draw, daemon=True)
        if self.live:
            self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        if self.live:
            self.thread.join()
            print("\r" + " " * (shutil.get_terminal_size().columns - 1) + "\r", end="", flush=True)


@contextlib.contextmanager
def locked(folder: Path):
    """One set-up at a time: the second `make` waits for the first. Without effect where the disk cannot lock."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another set-up of the same folder")
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass
        yield
    finally:
        os.close(handle)


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old text or the new one, never half."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w") as file:
        file.write(text + "\n")
    os.replace(name, path)


def say(text: str) -> None:
    print(text, flush=True)


# ---------------------------------------------------------------------------------------------------------- commands


def lecture(phase: str) -> str:
    """Path of a phase's lecture below the course's folder; raises Stop for a phase that is not there."""
    there = {int(path.name[:2]): path.name for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))}
    if not there:
        raise Stop("there are no lectures in notebooks/: build them with `make build`.")
    if not phase.isdigit() or int(phase) not in there:
        raise Stop(f"there is no phase {phase}: choose PHASE from {', '.join(map(str, there))}.")
    return f"notebooks/{there[int(phase)]}"


def lab_command(python: str, phase: str, options: list[str]) -> list[str]:
    """JupyterLab on the course's folder, opened at a phase's lecture, in the browser or by the URL that it prints."""
    command = [python, "-m", "jupyterlab", f"--ServerApp.root_dir={ROOT}"]
    command.append(f"--LabApp.default_url=/lab/tree/{lecture(phase)}")
    if os.geteuid() == 0 and "--allow-root" not in options:
        command.append("--allow-root")
    return command + options


def run(command: str, options: list[str]) -> None:
    """Set up where needed and become the command's process. Does not return, but for `setup`."""
    place = os.environ.get("VENV") or ".venv"
    environment = dict(os.environ)
    if place == "none":
        python = sys.executable
    else:
        venv = Environment(ROOT / place)
        if command == "doctor":  # it has to work where the set-up does not
            python = str(venv.python) if python_version(venv.python) else sys.executable
        else:
            venv.ready()
            python = str(venv.python)
        environment = clean_environment()
        environment["VIRTUAL_ENV"] = str(venv.folder)
        environment["PATH"] = f"{venv.folder / 'bin'}{os.pathsep}{environment.get('PATH', os.defpath)}"
    if command == "setup":
        say(f"ready: {python}")
        return
    words = {
        "lab": lambda: lab_command(python, os.environ.get("PHASE") or "0", options),
        "test": lambda: [python, str(ROOT / "tools" / "run_tests.py"), *options],
        "build": lambda: [python, str(ROOT / "src" / "lessons" / "build.py"), *options],
        "doctor": lambda: [python, str(ROOT / "src" / "flashlab" / "doctor.py"), *options],
        "python": lambda: [python, *options],
    }[command]()
    os.chdir(ROOT)
    sys.stdout.flush()
    os.execve(words[0], words, environment)


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in ("setup", "lab", "test", "build", "doctor", "python"):
        print(__doc__)
        return 2
    try:
        run(sys.argv[1], sys.argv[2:])
    except Stop as stop:
        print(f"stopped: {stop}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped by you; the next run goes on from here.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
