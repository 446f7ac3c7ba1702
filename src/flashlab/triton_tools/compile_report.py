"""Ask the real Triton compiler what a kernel costs on a GPU that need not be here.

>>> report = compile_report(kernel, {"q_ptr": torch.float16, "n": 1024, "BLOCK": 64}, target="sm_90")
>>> report.shared_bytes, report.shared_limit, report.instructions["HGMMA"]

The kernel's source goes to a child process (this one may interpret, see flashlab.runtime), which compiles it down to
the GPU's machine code with the ptxas that comes with Triton; cuobjdump, also with Triton, lists the instructions. No
GPU and no driver take part. Reports are cached on disk by source, arguments, target and versions.
"""

import difflib
import gzip
import hashlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from flashlab import runtime
from flashlab.runtime import cache
from flashlab.triton_tools import compile_child
from flashlab.triton_tools.portable import jit_function, module_source, unwrap

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")  # the targets that the course's kernels are compiled for

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
TENSOR_CORE_OPCODES = ("HMMA", "HGMMA", "UTCHMMA", "IMMA", "QMMA", "QGMMA", "OMMA", "DMMA")
_FORMAT = 3  # of the cache's entries; raise it when what is stored changes


@dataclass(frozen=True)
class CompileReport:
    """What the compiler made of one kernel for one target.

    shared_bytes   shared memory of one block (program), in bytes
    registers      32-bit registers of one thread
    spill_bytes    bytes that one thread spills from registers to local memory (ptxas: spill stores)
    instructions   Counter of SASS opcodes without their modifiers (HMMA, HGMMA, LDSM, LDGSTS), MUFU with its function
                   (MUFU.EX2)
    ptx, sass      the text of both
    error          where the compiler refused: its own message; the figures are then None, ptx and sass empty
    seconds        what compiling took, when it was done
    """

    kernel: str
    target: str
    num_warps: int
    num_stages: int
    ok: bool
    error: str | None = field(repr=False)
    shared_bytes: int | None
    registers: int | None
    spill_bytes: int | None
    instructions: Counter = field(repr=False)
    ptx: str = field(repr=False)
    sass: str = field(repr=False)
    seconds: float = field(compare=False)
    from_cache: bool = field(compare=False)

    @property
    def shared_limit(self) -> int:
        """The most shared memory a block can have on this target, in bytes."""
        return runtime.limits(self.target).shared_per_block

    @property
    def fits(self) -> bool:
        """It compiled, and its shared memory is within the target's limit: such a kernel can be launched."""
        return self.ok and self.shared_bytes is not None and self.shared_bytes <= self.shared_limit

    @property
    def tensor_core_instructions(self) -> int:
        """How many tensor-core instructions the code has (in the text, not executed)."""
        return sum(self.instructions[opcode] for opcode in TENSOR_CORE_OPCODES)

    @property
    def error_line(self) -> str | None:
        """The last line of the compiler's message, where Triton says what is wrong."""
        lines = [line.strip() for line in (self.error or "").splitlines() if line.strip(" ^")]
        return lines[-1] if lines else None

    def __repr__(self) -> str:
        head = f"{self.kernel} on {self.target}"
        if not self.ok:
            return f"{head}: refused: {self.error_line}"
        verdict = "fits" if self.fits else "does not fit"
        spilled = f", {self.spill_bytes} bytes spilled" if self.spill_bytes else ""
        return (
            f"{head}: {self.shared_bytes} of {self.shared_limit} bytes of shared memory ({verdict}), "
            f"{self.registers} registers{spilled}, {self.tensor_core_instructions} tensor-core instructions"
        )


def compile_report(
    kernel,
    arguments: Mapping[str, object],
    *,
    target: str = "sm_90",
    num_warps: int = 4,
    num_stages: int = 3,
    timeout: float = 300,
) -> CompileReport:
    """Compile a Triton kernel for a target and say what it needs.

    kernel      a ``@triton.jit`` function, compiled or interpreted here, perhaps under ``@triton.autotune``, or a
                ``@gluon.jit`` function; from a module or from a notebook cell.
    arguments   name -> what a launch would get: a torch.dtype stands for a 16-byte aligned tensor of that type, or give
                a tensor, an int, a float, a bool, None; a value for each ``tl.constexpr``. They are specialised as a
                launch does (integers that are 1 or divisible by 16). Launch options such as ``num_warps`` may be among
                them and win over the keywords.
    target      "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120".
    timeout     seconds.

    A kernel that the compiler refuses gives a report with ``ok`` False and its message in ``error``. Raises TypeError
    for something that is no kernel and for a missing or unknown argument, ValueError for a kernel whose source cannot
    be found, UnknownGpu for the target, TimeoutError, RuntimeError where the machine is at fault, or the child.
    """
    return compile_reports(
        kernel, [arguments], targets=[target], num_warps=num_warps, num_stages=num_stages, timeout=timeout
    )[0]


def compile_reports(
    kernel,
    list_of_arguments: Iterable[Mapping[str, object]],
    *,
    targets: Sequence[str] = TARGETS,
    num_warps: int = 4,
    num_stages: int = 3,
    timeout: float = 300,
    shared_only: bool = False,
) -> list[CompileReport]:
    """compile_report for every arguments and every target: [arguments 0 on each target, arguments 1 on each, ...].

    What is not in the cache is shared out to two child processes; ``timeout`` is for one compilation.
    shared_only: stop when the shared memory is known, in less than half of the time; the rest of a report is empty.
    """
    if jit_function(kernel) is None:
        raw = unwrap(kernel)
        what = f"the plain function {raw.__name__}" if inspect.isfunction(raw) else f"a {type(kernel).__name__}"
        raise TypeError(f"a report is for a @triton.jit kernel; this is {what}")
    name = unwrap(kernel).__name__
    source = module_source(kernel)
    jobs: list[dict[str, Any]] = []
    for arguments in list_of_arguments:
        encoded, options = _encode(kernel, arguments, {"num_warps": num_warps, "num_stages": num_stages})
        for target in targets:
            capability = runtime.limits(target).capability
            jobs.append({
                "index": len(jobs),
                "capability": capability[0] * 10 + capability[1],
                "arguments": encoded,
                "options": options,
                "shared_only": shared_only,
            })  # fmt: skip
    keys = [_key(source, name, job) for job in jobs]
    stored = {key: outcome for key in set(keys) if (outcome := _cached(key))}
    missing = {key: job for key, job in zip(keys, jobs, strict=True) if key not in stored}
    fresh = _compile(source, name, missing, timeout) if missing else {}
    return [
        _report(name, job, stored[key] if key in stored else fresh[key], from_cache=key in stored)
        for key, job in zip(keys, jobs, strict=True)
    ]


def _encode(kernel, arguments: Mapping[str, object], options: dict) -> tuple[dict, dict]:
    """Arguments as JSON, checked against the kernel's signature; launch options taken out of them."""
    raw = unwrap(kernel)
    parameters = inspect.signature(raw).parameters
    options = options | {name: arguments[name] for name in OPTIONS if name in arguments and name not in parameters}
    given = {name: value for name, value in arguments.items() if name in parameters or name not in OPTIONS}
    unknown = [name for name in given if name not in parameters]
    if unknown:
        near = difflib.get_close_matches(unknown[0], parameters, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(parameters)}"
        raise TypeError(f"kernel {raw.__name__} has no argument {unknown[0]!r}{hint}")
    missing = [
        name for name, parameter in parameters.items() if name not in given and parameter.default is parameter.empty
    ]
    if missing:
        raise TypeError(f"kernel {raw.__name__} also needs a value for {', '.join(missing)}")
    for name, value in given.items():
        if type(value) is int and "constexpr" not in str(parameters[name].annotation):
            given[name] = _alike(value)
    return {name: _encode_value(raw.__name__, name, value) for name, value in given.items()}, options


def _alike(value: int) -> int:
    """An integer for which a launch compiles the same kernel: 1, or what is divisible by 16, or not, and as wide."""
    if value == 1:
        return 1
    beyond = 0 if -(2**31) <= value < 2**31 else 2**32 if value < 2**63 else 2**63
    return beyond + (16 if value % 16 == 0 else 17)


def _encode_value(kernel: str, name: str, value):
    if isinstance(value, torch.dtype):
        return ["pointer", [str(value).removeprefix("torch."), True]]
    if isinstance(value, torch.Tensor):
        return ["pointer", [str(value.dtype).removeprefix("torch."), value.data_ptr() % 16 == 0]]
    if type(value).__module__.startswith("triton.language"):
        if type(value).__name__ == "constexpr":
            return _encode_value(kernel, name, value.value)
        if type(value).__name__ == "dtype":
            return ["dtype", value.name]
    if type(value).__name__ == "TensorDescriptor" and hasattr(value, "layout"):  # Gluon's
        layout = value.layout
        box = [value.shape, value.strides, value.block_shape]
        kept = [layout.swizzle_byte_width, layout.element_bitwidth, layout.rank]
        return ["box", [_encode_value(kernel, name, value.base)[1], *(list(map(int, x)) for x in box), kept]]
    if value is None or type(value) in (bool, int, float, str):
        return ["value", value]
    if type(value) is tuple:
        return ["tuple", [_encode_value(kernel, name, item) for item in value]]
    raise TypeError(
        f"argument {name!r} of kernel {kernel} is a {type(value).__name__}: give a torch.dtype (a tensor of that "
        "type), a tensor, an int, a float, a bool, a string or None"
    )


def _report(name: str, job: dict, outcome: dict, from_cache: bool) -> CompileReport:
    sass = outcome.get("sass", "")
    capability = job["capability"]
    return CompileReport(
        kernel=name,
        target=f"sm_{capability}",
        num_warps=job["options"]["num_warps"],
        num_stages=job["options"]["num_stages"],
        ok="error" not in outcome,
        error=outcome.get("error"),
        shared_bytes=outcome.get("shared_bytes"),
        registers=outcome.get("registers"),
        spill_bytes=outcome.get("spill_bytes"),
        # "0a30 @!P0 HMMA.16816.F32 R4, ..." counts as HMMA, "MUFU.EX2 R1, R2" as MUFU.EX2.
        instructions=Counter(re.findall(r"^[0-9a-f]+ (?:@!?U?P\w+ )?(MUFU\.\w+|[A-Z][A-Z0-9_]*)", sass, re.MULTILINE)),
        ptx=outcome.get("ptx", ""),
        sass=sass,
        seconds=outcome["seconds"],
        from_cache=from_cache,
    )


# ---- the cache ------------------------------------------------------------------------------------------------------


def _key(source: str, name: str, job: dict) -> str:
    parts = [_FORMAT, version("triton"), source, name, job["capability"], job["arguments"], job["options"],
             job["shared_only"]]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _cached(key: str) -> dict | None:
    try:
        outcome = json.loads(gzip.decompress((cache.folder("compile") / f"{key}.json.gz").read_bytes()))
        said = outcome.get("refused") or outcome["sass"] or outcome["registers"] is None  # shared_only
        whole = outcome["key"] == key and outcome["seconds"] >= 0 and said
        return outcome if whole else None
    except (cache.CacheError, OSError, EOFError, ValueError, KeyError, TypeError):  # damaged: again
        return None


def _store(key: str, outcome: dict) -> None:
    try:
        folder = cache.folder("compile")
        cache.write_whole(
            folder / f"{key}.json.gz", gzip.compress(json.dumps(outcome | {"key": key}).encode(), mtime=0)
        )
        cache.sweep(folder)
    except (cache.CacheError, OSError):
        pass  # an unwritable or full disk costs the cache, nothing else


# ---- the child processes --------------------------------------------------------------------------------------------


def _compile(source: str, name: str, jobs: dict[str, dict], timeout: float) -> dict[str, dict]:
    """Outcomes by key; jobs are dealt out like cards, so that each child gets large and small ones."""
    hands = [dict(list(jobs.items())[i::2]) for i in range(min(2, len(jobs)))]
    with ThreadPoolExecutor(len(hands)) as pool:
        futures = [pool.submit(_run_jobs, source, name, hand, timeout) for hand in hands]
        return {key: outcome for future in futures for key, outcome in future.result().items()}


def _run_jobs(source: str, name: str, jobs: dict[str, dict], timeout: float) -> dict[str, dict]:
    keys = {job["index"]: key for key, job in jobs.items()}
    outcomes: dict[str, dict] = {}
    while waiting := [job for key, job in jobs.items() if key not in outcomes]:
        lines, ended, complaint = _run_child(source, name, waiting, timeout * len(waiting))
        started = None
        for line in lines:
            if "fatal" in line:
                raise RuntimeError(f"the compiling process could not load the source of {name}: {line['fatal']}")
            key = keys[line.pop("job")]
            if "started" in line:
                started = key
            elif "error" in line and not line["refused"]:  # not stored: the next attempt may fare better
                raise RuntimeError(f"{name} could not be compiled on this machine: {line['error']}")
            else:
                outcomes[key] = line
                _store(key, line)
        if ended is None:
            raise TimeoutError(f"compiling {name} took more than {timeout:g} seconds a configuration and was stopped")
        if ended == 0:
            break
        if started is None or started in outcomes or re.search(compile_child.MACHINE, complaint):
            raise RuntimeError(f"the compiling process ended with status {ended}: {complaint}")
        # The compiler itself died (an assertion or a fault in LLVM or MLIR, too little memory): that is the outcome of
        # this job. It is not stored: the next attempt may fare better.
        how = signal.Signals(-ended).name if ended < 0 else f"status {ended}"
        outcomes[started] = {"error": f"the compiler crashed ({how}): {complaint}", "seconds": 0.0}
    return outcomes


def _run_child(source: str, name: str, jobs: list[dict], timeout: float) -> tuple[list[dict], int | None, str]:
    """The child's result lines, its exit status (None: stopped at the timeout), the end of what it wrote to stderr."""
    with tempfile.TemporaryDirectory(prefix="flashlab-compile-") as folder:
        request, results, errors = (Path(folder) / file for file in ("request.json", "results.jsonl", "stderr.txt"))
        sys_path = [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path]
        content = {"source": source, "name": name, "jobs": jobs, "sys_path": sys_path}
        request.write_text(json.dumps(content), encoding="utf-8")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "MLIR_", "LLVM_"))}
        environment |= {"FLASHLAB_INTERPRET": "0", "TRITON_CACHE_DIR": str(Path(folder) / "triton")}
        script = Path(__file__).with_name("compile_child.py")
        with errors.open("wb") as stderr:
            child = subprocess.Popen(
                [sys.executable, str(script), str(request), str(results)],
                env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr,
                start_new_session=True,  # so that ptxas, its child, can be stopped with it
            )  # fmt: skip
        try:
            ended = child.wait(timeout)
        except subprocess.TimeoutExpired:
            ended = None
        finally:
            if child.poll() is None:  # timed out, or interrupted from the keyboard
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        text = results.read_text(encoding="utf-8") if results.exists() else ""
        complaint = errors.read_text(errors="replace").strip().splitlines()
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")], ended, "\n".join(complaint[-3:])
