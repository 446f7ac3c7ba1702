"""What a compiler's message means for a CUDA source: the header that is not emulated, the include that is missing."""

import re

from flashlab.simt.errors import CompileError
from flashlab.simt.source import blank_comments

# CUDA's headers, and others that CUDA sources include: what to use in the emulator instead.
_INSTEAD = (
    (r"cooperative_groups.*", "__syncthreads, __syncwarp and the __shfl functions"),
    (r"mma\.h|crt/mma\.h", "mma_m16n8k16 and ldmatrix_x4 of ptx.cuh"),
    (r"cuda/(pipeline|barrier|ptx).*", "cp_async, cp_async_commit and cp_async_wait of ptx.cuh"),
    (r"cub/.*", "a reduction or scan with the __shfl functions"),
    (r"(curand|curand_kernel|cublas|cublas_v2|cublasLt|cudnn|cufft|cusparse|cusolver\w*)(\.h|\w*\.h)", "arrays made by "
     "numpy or torch, which also do what the library does"),
    (r"(thrust|cuda|nv)/.*", "plain pointers and loops"),
    (r"(cutlass|cute)/.*", "ptx.cuh"),
    (r"cuda_fp8\.h|cuda_fp4\.h|cuda_fp6\.h", "__half or __nv_bfloat16"),
    (r"(torch|ATen|c10|pybind11)/.*", 'an extern "C" function that takes pointers; load_inline makes the binding'),
    (r"(helper_|nvToolsExt|nvtx3/|cuda_profiler).*", "nothing: leave it out"),
    (r"cuda\w*\.h|device_functions\.h|math_constants\.h|sm_\w+\.h", "simt.h, and cuda_fp16.h or cuda_bf16.h"),
)  # fmt: skip
_NO_SIMT = 'did you forget #include "simt.h" at the top? It is what makes CUDA C++ of a source for the emulator'


def check_included(text: str, name: str) -> None:
    """Raises CompileError for CUDA C++ that includes none of the emulator's headers."""
    for number, line in enumerate(blank_comments(text).splitlines(), 1):
        if word := re.search(r"__(global|device|shared|host)__|<<<|\bthreadIdx\b", line):
            raise CompileError(f"{name}:{number}: error: {word[0]} is not known here: {_NO_SIMT}")


def explained(log: str, name: str) -> str:
    """The compiler's messages, with a sentence for what the emulator does not have."""
    log = log.strip()

    def header(match: re.Match) -> str:
        instead = next((use for pattern, use in _INSTEAD if re.fullmatch(pattern, match[2])), None)
        if instead is None:
            return match[0]
        return f"{match[1]}error: {match[2]} is not emulated: use {instead}"

    log = re.sub(r"((?:\S+:\d+(?::\d+)?: )?)fatal error: (\S+): No such file or directory", header, log)
    for call in re.findall(r"[‘'](cuda[A-Z]\w+|cu[A-Z]\w+)[’'] was not declared", log)[:1]:
        instead = "pass arrays to the entry" if re.search("Malloc|Free|Memcpy", call) else "leave it out"
        if re.search("GridDependency|Programmatic|LaunchAttribute", call):
            instead = "a launch ends before the next one begins, so leave it out"
        log += f"\n{name}: note: {call} is not emulated: {instead}"
    return log
