"""What this machine has, and which phase of the course runs how on it: `flashlab doctor`, or `make doctor`.

Standard library only (rich where it is installed), and every package is asked in a process of its own, so that a torch
that is missing, broken or crashing is one line of the report and not the end of it. This file also runs by its path,
without the package: `python src/flashlab/doctor.py`, on a machine where nothing is installed yet.

Nothing is a failure here: the exit status is 0, and what could be better stands in the advice.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from flashlab.course import PHASES, Phase
    from flashlab.table import Table
else:  # run by its path: its own folder is on the path, and the package, which imports torch, is not
    from course import PHASES, Phase
    from table import Table

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ((3, 10), (3, 14))
# (torch, triton) that every test of the course has passed with.
TRIED = {("2.13", "3.7"), ("2.11", "3.6")}
_PACKAGES = ("torch", "triton", "numpy")

# collect_env (what PyTorch's maintainers ask for in a report) takes seconds, and is asked for with --json only.
_ASK_TORCH = """
import json, sys, torch
gpus = []
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        gpus.append(dict(
            name=p.name, capability=[p.major, p.minor], multiprocessors=p.multi_processor_count,
            shared_memory_per_block=getattr(p, "shared_memory_per_block_optin", None), memory=p.total_memory,
            l2=getattr(p, "L2_cache_size", None)))
collected = None
if sys.argv[1:] == ["collect"]:
    try:
        from torch.utils import collect_env
        collected = collect_env.get_env_info()._asdict()
    except Exception as error:
        collected = {"error": repr(error)}
print(json.dumps(dict(
    version=torch.__version__, built_for_cuda=torch.version.cuda, gpu_usable=torch.cuda.is_available(), gpus=gpus,
    collected=collected), default=str))
"""
_ASK_VERSION = "import json, {0}; print(json.dumps(dict(version={0}.__version__)))"


# ------------------------------------------------------------------------------------------------------------ asking


def ask_package(name: str, collect: bool = False, timeout: float = 120) -> dict[str, Any]:
    """What a fresh Python says of a package: {"version": ..., ...}, or {"missing": True}, or {"broken": "why"}."""
    if importlib.util.find_spec(name) is None:
        return {"missing": True}
    code = _ASK_TORCH if name == "torch" else _ASK_VERSION.format(name)
    command = [sys.executable, "-c", code, *(["collect"] if collect else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"broken": f"importing it took more than {timeout:.0f} s"}
    except OSError as error:
        return {"broken": str(error)}
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        said = done.stderr.strip().splitlines()
        return {"broken": said[-1] if said else f"importing it ended the process (status {done.returncode})"}


def driver_cuda() -> str | None:
    """The newest CUDA that the NVIDIA driver supports ("13.0"), None without a driver."""
    try:
        version = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0 or not version.value:
            return None
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def cores() -> int:
    """CPU cores that this process may use: its affinity, and a container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # "max 100000"
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        count = min(count, max(1, round(quota / period)))
    return count


def memory() -> int | None:
    """Bytes of memory that this process may use: the machine's, or a container's limit."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def has_ptxas() -> bool:
    """Whether Triton's wheel has the CUDA assembler: the compile reports use it, GPU or not."""
    spec = importlib.util.find_spec("triton")
    places = (spec.submodule_search_locations if spec else None) or []
    return any(Path(place, "backends", "nvidia", "bin", "ptxas").exists() for place in places)


def python_headers() -> bool:
    """Whether Python.h is there: Triton builds a small C module for each kernel that it launches on a GPU."""
    return Path(sysconfig.get_path("include"), "Python.h").exists()


def examine(collect: bool = False) -> dict[str, Any]:
    """The whole report, ready for JSON: machine, software, gpus, phases, advice. Takes a few seconds.

    collect: with what `python -m torch.utils.collect_env` says, as "collect_env".
    """
    ask = functools.partial(ask_package, collect=collect)
    with ThreadPoolExecutor() as pool:  # three processes side by side
        asked = dict(zip(_PACKAGES, pool.map(ask, _PACKAGES), strict=True))
    torch = asked["torch"]
    collected = torch.pop("collected", None)
    try:
        jupyterlab = importlib.metadata.version("jupyterlab")
    except importlib.metadata.PackageNotFoundError:
        jupyterlab = None
    report: dict[str, Any] = {
        "machine": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cores": cores(),
            "memory": memory(),
            "disk_free": shutil.disk_usage(ROOT if ROOT.exists() else Path.cwd()).free,
        },
        "software": {
            "python": platform.python_version(),
            "environment": sys.prefix,
            **asked,
            "jupyterlab": jupyterlab,
            "compiler": "g++" if shutil.which("g++") else None,
            "python_headers": python_headers(),
            "nvcc": _nvcc(),
            "ptxas": has_ptxas(),
            "driver_cuda": driver_cuda(),
        },
        "gpus": torch.get("gpus") or [],
        "interpret": _wish_to_interpret(),
    }
    report["phases"] = [phase_report(phase, report) for phase in PHASES]
    report["advice"] = advice(report)
    return report | ({"collect_env": collected} if collect else {})


def _nvcc() -> str | None:
    nvcc = shutil.which("nvcc") or str(Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda", "bin", "nvcc"))
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"release (\d+\.\d+)", text)
    return found[1] if found else None


def without_home(value: Any) -> Any:
    """The report with `~` for the user's home folder, so that it can be shown to others."""
    if isinstance(value, dict):
        return {name: without_home(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [without_home(x) for x in value]
    if isinstance(value, str):
        for home in {str(Path.home()), str(Path.home().resolve())} - {"/"}:
            value = re.sub(re.escape(home) + r"(?![\w.-])", "~", value)
    return value


def _wish_to_interpret() -> bool | None:
    """What the environment asks for, as flashlab.runtime reads it: True, False, or None for "decide by the GPU"."""
    wish = os.environ.get("FLASHLAB_INTERPRET", "").strip()
    if wish in ("0", "1"):
        return wish == "1"
    return True if os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true", "on", "yes", "y") else None


# ----------------------------------------------------------------------------------------------------------- judging


def phase_report(phase: Phase, report: dict[str, Any]) -> dict[str, Any]:
    """How one phase runs on the machine of `report`.

    Returns number, slug, title, mode ("native", "interpreted", "emulated" or
    "cannot run") and how, a few words.
    """
    software, gpus = report["software"], report["gpus"]
    torch = "version" in software["torch"]
    both, gpu = torch and "version" in software["triton"], bool(software["torch"].get("gpu_usable"))
    name, hopper = (gpus[0]["name"], gpus[0]["capability"][0] == 9) if gpus else ("GPU", False)
    compiles, nvcc = gpu and not report["interpret"], gpu and software["nvcc"] and software["compiler"]
    cuda = f"CUDA C++ compiled by nvcc {software['nvcc']} for the {name}"
    emulated = (software["compiler"], "emulated", "CUDA C++ run on the CPU by the course's emulator")
    reports = ", compile reports from the real compiler" * bool(software["ptxas"])
    ways = {  # by kind: whether it can, the mode, and how; the first that can
        "torch": [(torch, "native", "PyTorch on the CPU")],
        "triton": [(both and compiles, "native", f"Triton kernels compiled for the {name}"),
                   (both, "interpreted", f"Triton kernels interpreted on the CPU{reports}")],
        "gluon": [(both and compiles and hopper, "native", f"Gluon kernels compiled for the {name}"),
                  (both, "interpreted", "Gluon kernels compiled and read, not run")],
        "cuda": [(nvcc, "native", cuda), emulated],
        "hopper": [(nvcc and hopper, "native", cuda), emulated],
        "profiler": [(torch and gpu, "native", f"profiled on the {name}"),
                     (torch, "native", "on the CPU; recorded GPU figures")],
        "distributed": [(torch and gpu and len(gpus) > 1, "native", f"{len(gpus)} GPUs"),
                        (torch, "emulated", "ranks as threads on the CPU")],
    }  # fmt: skip
    needs = {"cuda": "a C++ compiler", "hopper": "a C++ compiler", "triton": "torch and triton"}
    able = [(mode, how) for can, mode, how in ways[phase.kind] if can]
    mode, how = able[0] if able else ("cannot run", f"needs {needs.get(phase.kind, 'torch')}")
    return {"number": phase.number, "slug": phase.slug, "title": phase.title, "mode": mode, "how": how}


def _short(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def advice(report: dict[str, Any]) -> list[str]:
    """Sentences on what is missing or could be better, the gravest first; empty where all is well."""
    software, machine = report["software"], report["machine"]
    said = [*_about_packages(software), *_about_gpu(report)]
    if not software["compiler"]:
        said.append("There is no C++ compiler, which the CUDA phases (and Triton on a GPU) need: install g++.")
    elif software["torch"].get("gpu_usable") and not software["nvcc"]:
        said.append("There is no nvcc, so the CUDA phases will be emulated: the CUDA toolkit has it.")
    if machine["memory"] is not None and machine["memory"] < 4e9:
        said.append(f"{machine['memory'] / 1e9:.1f} GB of memory is little: shut down kernels you are done with.")
    if machine["disk_free"] < 2e9:
        said.append(f"Only {machine['disk_free'] / 1e9:.1f} GB of disk are free: Triton's cache needs some.")
    return said


def _about_packages(software: dict[str, Any]) -> list[str]:
    """Python, and what is installed for it."""
    said = []
    torch, triton = software["torch"], software["triton"]
    version = tuple(int(part) for part in software["python"].split(".")[:2])
    if not PYTHONS[0] <= version <= PYTHONS[1]:
        said.append(f"Python {software['python']} is outside 3.10 to 3.14: set up with PYTHON=/path/to/another.")
    absent = [name for name in _PACKAGES if software[name].get("missing")]
    if absent:
        verb = "is" if len(absent) == 1 else "are"
        said.append(
            f"{' and '.join(', '.join(absent).rsplit(', ', 1))} {verb} not installed in {software['environment']}: "
            "`make lab` installs everything."
        )
    for name in _PACKAGES:
        if "broken" in software[name]:
            said.append(
                f"{name} is installed but does not load ({software[name]['broken']}): "
                "`make clean-venv`, then `make lab`, sets everything up afresh."
            )
    if "version" in torch and "version" in triton:
        if (_short(torch["version"]), _short(triton["version"])) not in TRIED:
            pairs = " or ".join(f"torch {a} with triton {b}" for a, b in sorted(TRIED, reverse=True))
            said.append(
                f"torch {torch['version']} with triton {triton['version']} is a pair that the course was not tried "
                f"with ({pairs}): outputs may differ from those shown."
            )
    if software["jupyterlab"] is None and "version" in torch:
        said.append("JupyterLab is not installed here: `make lab` installs it.")
    return said


def _about_gpu(report: dict[str, Any]) -> list[str]:
    """Why torch, or a native kernel, cannot use it."""
    software, gpus, said = report["software"], report["gpus"], []
    torch = software["torch"]
    if "version" in torch and not torch["gpu_usable"] and (gpus or software["driver_cuda"]):
        if torch["built_for_cuda"] is None:
            said.append(
                "There is an NVIDIA driver, but this torch is a CPU build: for native kernels install the CUDA "
                "build of the same version; until then everything runs as on a machine without a GPU."
            )
        else:
            said.append(
                f"torch was built for CUDA {torch['built_for_cuda']} and cannot use the GPU "
                f"(driver: CUDA {software['driver_cuda'] or 'unknown'}): update the driver, or look at "
                "CUDA_VISIBLE_DEVICES; until then everything runs as on a machine without a GPU."
            )
    if torch.get("gpu_usable"):
        if tuple(gpus[0]["capability"]) < (8, 0):
            major, minor = gpus[0]["capability"]
            said.append(
                f"The {gpus[0]['name']} has compute capability {major}.{minor} and the course's kernels need 8.0: "
                "set FLASHLAB_INTERPRET=1 to interpret them on the CPU."
            )
        if report["interpret"]:
            said.append(
                "FLASHLAB_INTERPRET or TRITON_INTERPRET asks for interpreted kernels although there is a GPU: "
                "unset it to run natively."
            )
        if not software["python_headers"]:
            name = f"python{_short(software['python'])}-dev"
            said.append(f"Python.h is missing, and Triton needs it to launch GPU kernels: install {name}.")
    return said


# ---------------------------------------------------------------------------------------------------------- printing


def _package_line(answer: dict[str, Any]) -> str:
    if answer.get("missing"):
        return "not installed"
    return answer.get("version") or f"does not load: {answer['broken']}"


def rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, value) for the first table."""
    machine, software = report["machine"], report["software"]
    torch = software["torch"]
    built = ""
    if "version" in torch:
        built = f", built for {'CUDA ' + torch['built_for_cuda'] if torch['built_for_cuda'] else 'the CPU'}"
    found = [
        ("System", machine["system"]),
        ("Cores, memory", f"{machine['cores']}, {machine['memory'] / 1e9:.1f} GB" if machine["memory"] else "?"),
        ("Disk free", f"{machine['disk_free'] / 1e9:.0f} GB"),
        ("Python", f"{software['python']} in {software['environment']}"),
        ("torch", _package_line(torch) + built),
        ("triton", _package_line(software["triton"])),
        ("numpy", _package_line(software["numpy"])),
        ("JupyterLab", software["jupyterlab"] or "not installed"),
        ("C++ compiler", software["compiler"] or "none"),
        ("nvcc", software["nvcc"] or "none"),
        ("NVIDIA driver", f"CUDA {software['driver_cuda']}" if software["driver_cuda"] else "none"),
    ]
    for gpu in report["gpus"]:
        shared = gpu.get("shared_memory_per_block")
        found.append(("GPU", gpu["name"] + ", compute capability {}.{}".format(*gpu["capability"])))
        details = f"{gpu['memory'] / 2**30:.0f} GiB"
        found.append(("", details + (f", {shared} bytes of shared memory per block" if shared else "")))
    return found if report["gpus"] else [*found, ("GPU", "none")]


def print_report(report: dict[str, Any]) -> None:
    """The report for people, with rich where it is installed and as plain text, in ASCII, where it is not."""
    phases = [(str(p["number"]), p["title"], p["mode"], p["how"]) for p in report["phases"]]
    tables = [Table.of(rows(report), ("This machine", "")), Table.of(phases, ("", "The course on it", "Runs", "How"))]
    advice = "\n\n".join(f"- {sentence}" for sentence in report["advice"]) or "Nothing is missing."
    try:
        from rich.console import Console

        Console(highlight=False, markup=False).print(*tables, advice, sep="\n")
    except ImportError:
        print(*(str(part).replace("─", "-") for part in (*tables, advice)), sep="\n\n")


def main(arguments: list[str]) -> int:
    """`doctor.py [--json]`."""
    unknown = [argument for argument in arguments if argument != "--json"]
    if unknown:
        print(f"unknown option {unknown[0]}: there is only --json", file=sys.stderr)
        return 2
    report = without_home(examine(collect="--json" in arguments))
    if "--json" in arguments:
        print(json.dumps(report, indent=2))
    else:
        print_report(report)
    return 0


if __name__ == "__main__":
    # Run by its path, Python puts this folder first on sys.path, where `check` or `show` could hide other packages.
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != Path(__file__).resolve().parent]
    sys.exit(main(sys.argv[1:]))
