// The emulator's matrix and copy operations: what ptx_emulated.h calls where nvcc would see inline PTX.
#pragma once
#include "warp.h"

enum SimtMma {
    SIMT_M16N8K16 = 0,
    SIMT_M16N8K8 = 1,  // the shape
    SIMT_MMA_F16 = 0,
    SIMT_MMA_BF16 = 2,  // A and B
    SIMT_MMA_ACC_F32 = 0,
    SIMT_MMA_ACC_F16 = 4,  // C and D
};
struct SimtMmaIn {
    uint32_t a[4], b[2], c[4];
};
struct SimtStmatrixIn {
    uint32_t address, r[4];
};
enum { SIMT_MATRIX_TRANS = 8 };  // ldmatrix, stmatrix: added to the count (1, 2, 4)

extern "C" {
uint32_t simt_shared_address(const void* p);  // the 32-bit address of a byte of shared memory
void simt_cp_async(uint32_t dst, const void* src, int bytes, int src_bytes);
void cp_async_commit();
void simt_cp_async_wait(int groups_left);  // -1: wait_all
}
SIMT_INLINE size_t __cvta_generic_to_shared(const void* p) { return simt_shared_address(p); }

SIMT_INLINE void simt_stmatrix(uint32_t address, const uint32_t* r, int count, int trans) {
    SimtStmatrixIn in = {address, {}};
    for (int i = 0; i < count; i++) in.r[i] = r[i];
    simt_warp(SIMT_STMATRIX, 0xffffffffu, &in, nullptr, count | trans);
}

// The intrinsics of <cuda_pipeline.h> that have the same meaning
SIMT_INLINE void __pipeline_memcpy_async(void* dst, const void* src, size_t bytes, size_t zero_fill = 0) {
    simt_cp_async(simt_shared_address(dst), src, (int)bytes, (int)(bytes - zero_fill));
}
SIMT_INLINE void __pipeline_commit() { cp_async_commit(); }
SIMT_INLINE void __pipeline_wait_prior(size_t n) { simt_cp_async_wait((int)n); }
