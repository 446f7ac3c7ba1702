// simt.h - include this first in a .cu file, and the same file runs on a GPU and on a CPU.
//
//   nvcc          the header is nearly empty: only LAUNCH.
//   g++, clang++  the CUDA language is spelled in C++, and the kernels run in the emulator of ../runtime:
//                 a thread block is an OS thread, a CUDA thread is a fiber, and an operation of the whole
//                 warp (shuffle, ldmatrix, mma) happens when the last of its lanes has arrived.
//
// LAUNCH(kernel, grid, block, shared_bytes, stream, args...) is kernel<<<grid, block, shared_bytes,
// stream>>>(args...). Sources compiled by flashlab.simt may write the triple chevrons as well.
#pragma once

#ifdef __CUDACC__

#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
    (kernel)<<<(grid), (block), (shared_bytes), (cudaStream_t)(stream)>>>(__VA_ARGS__)

#else

#define SIMT_EMULATED 1

#include "simt/language.h"  // __global__, __shared__, threadIdx, dim3, float4 ...
#include "simt/warp.h"      // barriers, shuffles, votes
#include "simt/atomics.h"
#include "simt/maths.h"     // __expf, __fdividef, __popc ...
#include "simt/ptx_ops.h"   // ldmatrix, mma, cp.async: what ptx.cuh calls
#include "simt/host_api.h"  // LAUNCH, cudaGetLastError ...

#endif
