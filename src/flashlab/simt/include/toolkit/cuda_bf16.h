// __nv_bfloat16 and __nv_bfloat162 for the emulator: the interface of CUDA's <cuda_bf16.h>, written for a CPU.
#pragma once
#include "simt/names.h"
#include "simt.h"
#include "simt/half_common.h"

SIMT_SIXTEEN_BITS(__nv_bfloat16, __nv_bfloat162, bfloat16, bfloat162, simt_float_to_bf16, simt_bf16_to_float)
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;
#define CUDART_INF_BF16 __ushort_as_bfloat16((unsigned short)0x7F80U)
#define CUDART_NAN_BF16 __ushort_as_bfloat16((unsigned short)0x7FFFU)
#define CUDART_ZERO_BF16 __ushort_as_bfloat16((unsigned short)0x0000U)
#define CUDART_ONE_BF16 __ushort_as_bfloat16((unsigned short)0x3F80U)
#include "simt/names_end.h"
