"""FlashAttention, wall by wall: the solution modules that every notebook imports.

`flashlab.flash_attention(q, k, v, causal=True)` is the one door for a model (flashlab.attention.door), and
`flashlab.flash_attention_with_cache` that for a step of generation (flashlab.attention.cache_door).

The rooms, in the order in which they may import each other (a later one an earlier one, never the reverse):

    course          the phases of the course
    runtime         interpreted or compiled, the known GPUs, the cache
    triton_tools    Triton's interpreter repaired and watched; what the Triton compiler says of a kernel
    attention       the ideas in course order, from the formula to the Triton kernels
    kernels         the CUDA series: one .cu file a step
    simt            the emulator that runs CUDA C++ on a CPU
    cuda            load_inline, operators, compiled resources
    check           verify, diagnose, the catalogue of mistakes
    figures         what notebooks show: source, diffs, tables, plots
    models          an attention layer, and a language model that trains
    distributed     one sequence over many GPUs: ring, all-gather, Ulysses
    exercises       check, hint, progress, and each exercise's check
    bench           measurements, recorded and published figures
    doctor, cli     the `flashlab` command
"""

import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

# First of all: it decides whether Triton interprets, before anything imports triton.
try:
    from flashlab import runtime as runtime
except (ImportError, OSError):
    # Without a torch that loads there is nothing to teach; but `flashlab doctor` is there to say just that.
    if not _sys.argv[0].endswith("/flashlab"):
        raise
else:
    if runtime.INTERPRETED:
        try:
            from flashlab.triton_tools import repairs as _repairs
        except ModuleNotFoundError as error:  # no Triton for this platform; only the Triton phases need it
            if error.name != "triton":
                raise
        else:
            _repairs.install_repairs()

if _TYPE_CHECKING:
    from flashlab.attention.cache_door import flash_attention_with_cache
    from flashlab.attention.door import choose_backend, flash_attention

__version__ = "0.1.0"
__all__ = ["choose_backend", "flash_attention", "flash_attention_with_cache", "runtime"]


def __getattr__(name: str):
    """The door and its backends are imported when they are first asked for: `import flashlab` stays quick."""
    if name not in __all__[:-1]:
        raise AttributeError(f"module 'flashlab' has no attribute {name!r}")
    from flashlab.attention import cache_door, door
    from flashlab.cuda import operators  # noqa: F401  (registers the CUDA series as backends)

    globals().update({n: getattr(cache_door if n == "flash_attention_with_cache" else door, n) for n in __all__[:-1]})
    return globals()[name]
