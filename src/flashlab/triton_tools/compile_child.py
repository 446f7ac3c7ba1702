"""The compiling side of flashlab.triton_tools.compile_report: run as a script, with no GPU and without torch.

    python compile_child.py REQUEST RESULTS

REQUEST is a JSON file: the source of a module, the kernel's name, and jobs. For each job one JSON line is appended to
RESULTS, first {"job": i, "started": true} (so that the parent knows what a crash was about), then what came out.
"""

import contextlib
import ctypes
import errno
import io
import json
import linecache
import re
import signal
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

# What a tool says where the compiler would have had no objection.
MACHINE = "No space left|Disk quota|Input/output error|annot allocate memory|ut of memory|Read-only file system"


class Pointer:
    """Stands for a tensor in the argument list: what @triton.jit looks at is the dtype and the alignment."""

    def __init__(self, dtype: str, aligned: bool):
        self.dtype = DtypeName(dtype)
        self.address = 0 if aligned else 8

    def data_ptr(self) -> int:
        return self.address


class DtypeName(str):
    """Prints as torch's dtypes do; hashes like the name, so Triton's dtype table can keep it."""

    def __str__(self) -> str:
        return f"torch.{str.__str__(self)}"


def decode(spec):
    import triton.language as tl

    kind, value = spec
    if kind == "pointer":
        return Pointer(*value)
    if kind == "dtype":
        return tl.dtype(value)
    if kind == "box":
        from triton.experimental.gluon.language import NVMMASharedLayout
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        pointer, shape, strides, block_shape, layout = value
        return TensorDescriptor(Pointer(*pointer), shape, strides, block_shape, NVMMASharedLayout(*layout))
    if kind == "tuple":
        return tuple(decode(item) for item in value)
    return value


def load(source: str, name: str):
    """The object called ``name`` of a module made from ``source``.

    The module has a made-up file name, which inspect finds in linecache: a real one, in a temporary folder, would get
    into the PTX, and make every compilation's a different one.
    """
    module = types.ModuleType("kernel_source")
    module.__file__ = f"{name}.py"
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(keepends=True), module.__file__)
    sys.modules[module.__name__] = module
    exec(compile(source, module.__file__, "exec"), vars(module))
    return getattr(module, name)


class Enough(Exception):
    """What was wanted is known: the shared memory of a block, in bytes."""


@contextlib.contextmanager
def until_shared(backend):
    """Ends a compilation before LLVM writes PTX: by then Triton has given each tile its place."""

    def make_ptx(self, src, metadata, opt, capability):
        raise Enough(metadata["shared"])

    whole, backend.make_ptx = backend.make_ptx, make_ptx
    try:
        yield
    finally:
        backend.make_ptx = whole


def compile_job(kernel, job) -> dict:
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", job["capability"], 32)
    backend = make_backend(target)
    arguments = {name: decode(spec) for name, spec in job["arguments"].items()}
    # The JIT's own binder: it decides which integers are constants, and which arguments are divisible by 16.
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = binder(**arguments)
    options, signature, constexprs, attributes = kernel._pack_args(
        backend, dict(job["options"]), bound, specialization, job["options"]
    )
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource  # noqa: F811
    source = ASTSource(kernel, signature, constexprs, attributes)
    log = io.StringIO()
    knobs.nvidia.dump_ptxas_log = True
    knobs.compilation.always_compile = True  # of a kernel from Triton's own cache there is no log
    last = until_shared(type(backend)) if job["shared_only"] else contextlib.nullcontext()
    try:
        with contextlib.redirect_stdout(log), last:
            compiled = triton.compile(source, target=target, options=options.__dict__)
    except Enough as known:
        return {"shared_bytes": known.args[0], "registers": None, "spill_bytes": None, "ptx": "", "sass": ""}
    registers = re.search(r"Used (\d+) registers", log.getvalue())
    spills = re.search(r"(\d+) bytes spill stores", log.getvalue())
    return {
        "shared_bytes": compiled.metadata.shared,
        "registers": int(registers[1]) if registers else None,
        "spill_bytes": int(spills[1]) if spills else None,
        "ptx": compiled.asm["ptx"],
        "sass": disassemble(compiled.asm["cubin"]),
    }


def disassemble(cubin: bytes) -> str:
    """SASS, one instruction a line, without the encodings."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    lines = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?;)", listing, re.MULTILINE)
    return "\n".join(f"{address} {instruction}" for address, instruction in lines)


def chain(error: BaseException, what: str) -> list[BaseException]:
    """The error, its "__cause__" (or "__context__": what was being handled), and so on."""
    found = [error]
    while (further := getattr(found[-1], what)) is not None:
        found.append(further)
    return found


def error_text(error: BaseException) -> str:
    """The message that says most: an error inside a called @jit function is the cause of the caller's."""
    return "\n".join(f"{type(link).__name__}: {link}".rstrip() for link in chain(error, "__cause__"))


def is_refusal(error: BaseException) -> bool:
    """Whether it is the compiler that refuses, and not the machine (a full disk, no memory, a tool that was killed)."""
    causes = chain(error, "__cause__")
    if any(isinstance(e, (OSError, MemoryError, ImportError, subprocess.SubprocessError)) for e in causes):
        return False
    machine = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EIO, errno.EROFS, errno.EMFILE)
    # What was being handled: for ptxas's own refusal, its exit status.
    if any(isinstance(e, MemoryError) or getattr(e, "errno", None) in machine for e in chain(error, "__context__")):
        return False
    return re.search(rf"{MACHINE}|ptxas.* failed with error code (?:-|137)", error_text(error)) is None


def main(request_path: str, results_path: str) -> None:
    # Linux stops this process when its parent ends, however that comes about; compilers can take minutes.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
    request = json.loads(Path(request_path).read_text())
    sys.path[:] = request["sys_path"]
    with open(results_path, "a", encoding="utf-8") as results:

        def report(**line):
            print(json.dumps(line), file=results, flush=True)

        if set(re.findall(r"^(?:import|from) (\w+)", request["source"], re.MULTILINE)) <= {"triton", "math"}:
            # Triton's specialisation of arguments imports it to know torch.Tensor, which takes longer than compiling.
            sys.modules["torch"] = stand_in = types.ModuleType("torch")
            stand_in.Tensor = type("Tensor", (), {})  # type: ignore[attr-defined]
        try:
            from triton.runtime import cache

            if hasattr(cache, "triton_key"):  # a hash of its own files, half a gigabyte; our cache is thrown away
                cache.triton_key = lambda: "one process, one version"
            kernel = load(request["source"], request["name"])
        except Exception as error:
            report(fatal=error_text(error))
            return
        for job in request["jobs"]:
            report(job=job["index"], started=True)
            start = time.perf_counter()
            try:
                outcome = compile_job(kernel, job)
            except Exception as error:
                outcome = {"error": error_text(error), "refused": is_refusal(error)}
            report(job=job["index"], seconds=time.perf_counter() - start, **outcome)


if __name__ == "__main__":
    main(*sys.argv[1:])
