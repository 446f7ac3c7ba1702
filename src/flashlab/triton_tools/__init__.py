"""Triton without a GPU: its interpreter repaired and watched, and its compiler asked what a kernel needs.

repairs          what makes the interpreter agree with compiled kernels
watch            bounds checks and byte counters of interpreted kernels
compile_report   shared memory, registers, machine code, for a GPU that need not be here
portable         a kernel's source, taken to another process
"""
