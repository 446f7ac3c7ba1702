"""The C++ file of a PyTorch extension: it makes the extern "C" functions of a CUDA source callable with tensors."""

import textwrap
from collections.abc import Iterable

from flashlab.cuda.sources import takes_problem
from flashlab.simt.source import Entry, is_stream


def binding_source(entries: Iterable[Entry], name: str = "kernel.cu") -> str:
    """The text of the file, for a source of that name. Functions that take a struct Problem are left out: they are
    given tensors by CudaModule.

    A pointer is bound as a tensor (or None, a null pointer), a number as itself; the stream is PyTorch's current one on
    the device of the first tensor.
    """
    bound = [e for e in entries if not takes_problem(e)]
    declared = [
        f'extern "C" {e.returns} {e.name}('
        + ", ".join(("const void*" if p.const else "void*") if p.kind == "pointer" else p.kind for p in e.parameters)
        + ");"
        for e in bound
    ]
    functions = [_function(e) for e in bound]
    defined = [f'    m.def("{e.name}", &bound_{e.name});' for e in bound]
    newline = "\n"
    return f"""// The PyTorch binding of {name}: tensors in, a launch on their device and PyTorch's current stream.
#include <torch/csrc/utils/pybind.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

{newline.join(declared)}

using Tensor = std::optional<at::Tensor>;                      // None is a null pointer
static void* address(const Tensor& x) {{ return x ? x->data_ptr() : nullptr; }}
static std::optional<at::Device> device(const Tensor& x) {{
    if (x) return x->device();
    return std::nullopt;
}}

{(newline * 2).join(functions)}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{
{newline.join(defined)}
}}
"""


def _function(e: Entry) -> str:
    takes, gives, tensors = [], [], []
    for p in e.parameters:
        own = p.name.replace(" ", "_")
        if is_stream(p):
            gives.append("c10::cuda::getCurrentCUDAStream().stream()")
        elif p.kind == "pointer":
            tensors.append(own)
            takes.append(f"const Tensor& {own}")
            gives.append(f"address({own})")
        else:
            takes.append(f"{p.kind} {own}")
            gives.append(own)
    guard = f"    const c10::cuda::OptionalCUDAGuard guard(device({tensors[0]}));\n" if tensors else ""
    head = textwrap.fill(f"static {e.returns} bound_{e.name}({', '.join(takes)}) {{", 116, subsequent_indent=" " * 8)
    call = f"return {e.name}({', '.join(gives)});"
    call = textwrap.fill(call, 116, initial_indent=" " * 4, subsequent_indent=" " * 8)
    return f"{head}\n{guard}{call}\n}}"
