// The emulator's operations of a warpgroup: what wgmma_emulated.h calls where nvcc would see inline PTX.
#pragma once
#include "ptx_sm90_emulated.h"

enum SimtWgmma {  // added to N
    SIMT_WGMMA_BF16 = 512,
    SIMT_WGMMA_TRANS_A = 1024,
    SIMT_WGMMA_TRANS_B = 2048,
    SIMT_WGMMA_RS = 4096,  // A is in registers
};
struct SimtWgmmaIn {
    float* d;
    const uint32_t* a_registers;  // null: `a` is a descriptor
    uint64_t a, b;
    int add;
};

extern "C" {
void simt_wgmma_wait(int groups_left);
}
SIMT_INLINE void wgmma_fence() { simt_warp(SIMT_WGMMA_FENCE, 0xffffffffu, nullptr, nullptr, 0); }
SIMT_INLINE void wgmma_commit() { simt_warp(SIMT_WGMMA_COMMIT, 0xffffffffu, nullptr, nullptr, 0); }
