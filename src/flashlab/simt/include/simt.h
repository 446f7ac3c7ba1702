// simt.h - include this first in a .cu file, and the same file runs on a GPU and on a CPU.
//
//   nvcc          the header is empty.
//   g++           the CUDA language is spelled in C++, and the kernels run in the emulator of ../runtime:
//                 a thread block is an OS thread, a CUDA thread is a fiber, and an operation of the whole
//                 warp (shuffle, ldmatrix, mma) happens when the last of its lanes has arrived. A launch,
//                 kernel<<<grid, block, shared_bytes, stream>>>(args...), is no C++: flashlab.simt rewrites it.
#pragma once
#include "simt/names.h"

#ifndef __CUDACC__

#define SIMT_EMULATED 1

#include "simt/language.h"  // __global__, __shared__, threadIdx, dim3, float4 ...
#include "simt/warp.h"      // barriers, shuffles, votes
#include "simt/atomics.h"
#include "simt/maths.h"     // __expf, __fdividef, __popc ...
#include "simt/ptx_ops.h"   // ldmatrix, mma, cp.async: what ptx_emulated.h calls
#include "simt/host_api.h"  // launches, cudaGetLastError ...

#endif
#include "simt/names_end.h"
