"""The GPUs that the course speaks of: what a kernel may use on each, and how fast it is at best."""

from dataclasses import dataclass
from typing import Any

import torch


class UnknownGpu(KeyError):
    """No GPU of that name in the table, or none in this machine."""

    def __str__(self) -> str:  # KeyError prints the repr of its message
        return self.args[0]


@dataclass(frozen=True)
class GpuLimits:
    """What a kernel may use on one GPU, and how fast that GPU is at best.

    Sizes are in bytes, bandwidth in 10^9 bytes/s, throughput in 10^12 FLOP/s (dense, a fused multiply-add counts 2).
    A figure that is not known is None.
    """

    name: str
    capability: tuple[int, int]
    sms: int  # streaming multiprocessors
    shared_per_block: int  # the most a kernel may ask for (opt-in maximum)
    shared_per_sm: int
    registers_per_sm: int  # 32-bit registers
    l2_bytes: int
    memory_bytes: int
    memory_gb_s: float | None
    fp16_tflops: float | None  # tensor cores, float32 accumulation
    fp32_tflops: float | None  # outside the tensor cores
    fp16_fma_per_clock: int | None  # of one SM's tensor cores: multiply-adds with float32 sums, dense
    threads_per_sm: int
    blocks_per_sm: int  # at most, however small
    source: str

    @property
    def target(self) -> str:
        """The architecture name compilers use, "sm_90"."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def ridge(self) -> float | None:
        """FLOP a byte above which fp16 tensor-core work is bound by arithmetic, not by memory (roofline ridge)."""
        if self.fp16_tflops is None or self.memory_gb_s is None:
            return None
        return self.fp16_tflops * 1e12 / (self.memory_gb_s * 1e9)

    def resident(self, threads: int, shared_bytes: int, registers: int | None = None) -> dict[str, int]:
        """How many blocks of a kernel an SM has room for, by what they take.

        Args:
            threads: per block. shared_bytes: per block; the system takes 1 KiB more.
            registers: per thread; None leaves their limit out.
        """
        found = {"shared memory": self.shared_per_sm // (shared_bytes + KIB), "warps": self.threads_per_sm // threads}
        if registers is not None:  # a warp gets them in pieces of 256, of one scheduler's quarter
            per_warp = -(-registers * 32 // 256) * 256
            found = {"registers": self.registers_per_sm // 4 // per_warp * 4 // -(-threads // 32)} | found
        return found | {"blocks": self.blocks_per_sm}

    def resident_blocks(self, threads: int, shared_bytes: int, registers: int | None = None) -> int:
        """How many blocks of a kernel an SM holds at once; the arguments of `resident`."""
        return min(self.resident(threads, shared_bytes, registers).values())

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.target}): {self.sms} SMs, {self.shared_per_block} bytes of shared memory a block, "
            f"{self.l2_bytes / 2**20:.0f} MiB L2, {self.memory_bytes / 2**30:.0f} GiB"
        )


KIB, MIB, GIB = 2**10, 2**20, 2**30

# By compute capability what an SM has: KiB of shared memory, threads and blocks at most. A block has at most 1 KiB less
# shared memory (7.5: as much), which is the system's. CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability".
_PER_SM = {
    (7, 5): (64, 1024, 16), (8, 0): (164, 2048, 32), (8, 6): (100, 1536, 16), (8, 7): (164, 1536, 16),
    (8, 9): (100, 1536, 24), (9, 0): (228, 2048, 32), (10, 0): (228, 2048, 32), (10, 3): (228, 2048, 32),
    (12, 0): (100, 1536, 24), (12, 1): (100, 1536, 24),
}  # fmt: skip
SHARED_MEMORY = {at: ((kib - (at > (7, 5))) * KIB, kib * KIB) for at, (kib, _, _) in _PER_SM.items()}
"""Bytes of shared memory by compute capability: (a block at most, an SM)."""


def _gpu(name, capability, sms, l2_mib, memory_gib, memory_gb_s, fp16_tflops, fp32_tflops, source) -> GpuLimits:
    block, sm = SHARED_MEMORY[capability]
    return GpuLimits(
        name, capability, sms, block, sm, 64 * KIB, int(l2_mib * MIB), memory_gib * GIB,
        memory_gb_s, fp16_tflops, fp32_tflops, TENSOR_FMA.get(name), *_PER_SM[capability][1:], source,
    )  # fmt: skip


# fp16 multiply-adds with float32 sums, dense, that the tensor cores of an SM do per clock. White papers: four tensor
# cores per SM, of 256 (A100), 512 (H100) or 128 (GA102, Ada); GeForce does half of that with float32 sums. The others:
# TFLOP/s divided by SMs, boost clock and 2.
TENSOR_FMA = {
    "A100": 1024, "H100": 2048, "H200": 2048, "L4": 512, "L40S": 512,
    "RTX 3090": 256, "RTX 4090": 256, "RTX 5060 Ti": 256, "RTX 5090": 256,
}  # fmt: skip

_ADA = "NVIDIA Ada GPU Architecture whitepaper, appendix A"
_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A"
_DENSE = "datasheet, figures without sparsity"

# name, capability, SMs, L2 MiB, memory GiB, GB/s, fp16 and fp32 TFLOP/s, source. Within a compute capability the first
# one stands for it: limits("sm_90") is the H100.
GPUS: dict[str, GpuLimits] = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100", (8, 0), 108, 40, 80, 2039, 312, 19.5, f"NVIDIA A100 80GB SXM {_DENSE}"),
        _gpu("RTX 3090", (8, 6), 82, 6, 24, 936, 71, 35.6, "NVIDIA Ampere GA102 whitepaper, table 9"),
        _gpu("RTX 4090", (8, 9), 128, 72, 24, 1008, 165.2, 82.6, _ADA),
        _gpu("L4", (8, 9), 58, 48, 24, 300, 121, 30.3, f"NVIDIA L4 {_DENSE}"),
        _gpu("L40S", (8, 9), 142, 96, 48, 864, 362, 91.6, f"NVIDIA L40S {_DENSE}"),
        _gpu("H100", (9, 0), 132, 50, 80, 3350, 989, 67, f"NVIDIA H100 SXM {_DENSE}"),
        _gpu("H200", (9, 0), 132, 60, 141, 4800, 989, 67, f"NVIDIA H200 SXM {_DENSE}; L2 as its driver says"),
        _gpu("B200", (10, 0), 148, 126, 180, 8000, 2250, 75, f"NVIDIA HGX B200 {_DENSE}; L2 as its driver says"),
        _gpu("RTX 5060 Ti", (12, 0), 36, 32, 16, 448, 47.4, 23.7, f"{_BLACKWELL}; fp16 scaled from the RTX 5090's"),
        _gpu("RTX 5090", (12, 0), 170, 96, 32, 1792, 209.5, 104.8, _BLACKWELL),
    )
}
"""Known GPUs by name; the datasheet's figures, peak and dense."""


def limits(target_or_name: str | None = None) -> GpuLimits:
    """The limits of a GPU.

    ``None``: this machine's GPU, read from its driver; where there is none, UnknownGpu (a KeyError) is raised.
    ``"H200"``, ``"RTX 5090"``: that one of the table. ``"sm_90"``: the first of the table with that target.
    """
    if target_or_name is None:
        if not torch.cuda.is_available():
            raise UnknownGpu(f"this machine has no GPU; name one: {', '.join(GPUS)}")
        return _this_gpu()
    wanted = str(target_or_name).strip()
    for gpu in GPUS.values():
        if wanted.lower() in (gpu.name.lower(), gpu.target):
            return gpu
    targets = sorted({gpu.target for gpu in GPUS.values()}, key=lambda target: int(target[3:]))
    raise UnknownGpu(
        f"no GPU {wanted!r} in the table; there are {', '.join(GPUS)}, and the targets {', '.join(targets)}"
    )


def _this_gpu() -> GpuLimits:
    # Any: torch's stubs lack two of the fields.
    device_properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = (device_properties.major, device_properties.minor)
    known = _named_in(device_properties.name, capability)
    return GpuLimits(
        name=device_properties.name,
        capability=capability,
        sms=device_properties.multi_processor_count,
        shared_per_block=device_properties.shared_memory_per_block_optin,
        shared_per_sm=device_properties.shared_memory_per_multiprocessor,
        registers_per_sm=device_properties.regs_per_multiprocessor,
        l2_bytes=device_properties.L2_cache_size,
        memory_bytes=device_properties.total_memory,
        memory_gb_s=known.memory_gb_s if known else None,
        fp16_tflops=known.fp16_tflops if known else None,
        fp32_tflops=known.fp32_tflops if known else None,
        fp16_fma_per_clock=known.fp16_fma_per_clock if known else None,
        threads_per_sm=device_properties.max_threads_per_multi_processor,
        blocks_per_sm=_PER_SM.get(capability, (0, 0, 32))[2],
        source="this machine's driver" + (f"; speeds: {known.source}" if known else ""),
    )


def _named_in(full_name: str, capability: tuple[int, int]) -> GpuLimits | None:
    """The table's GPU that a driver's name ("NVIDIA GeForce RTX 5060 Ti", "NVIDIA A100-SXM4-80GB") stands for."""
    words = full_name.replace("-", " ").split()
    for gpu in sorted(GPUS.values(), key=lambda gpu: -len(gpu.name)):
        wanted = gpu.name.split()
        starts = (i for i in range(len(words)) if words[i : i + len(wanted)] == wanted)
        # "RTX 4090 Laptop" and "RTX 5090 D" are other chips; a form factor or a memory size after the name is not.
        if gpu.capability == capability and any(
            not set(words[i + len(wanted) :]) & {"Laptop", "Ti", "SUPER", "D", "PCIe", "NVL", "40GB"} for i in starts
        ):
            return gpu
    return None
