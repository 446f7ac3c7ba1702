// problem.cuh - what every kernel of the series begins with: one attention problem, as the host hands it over.
//
//   q [batch, heads, seq_q, head_dim], k and v [batch, kv_heads, seq_k, head_dim], o like q, lse [batch, heads, seq_q].
// A tensor has three strides, in elements: of the batch, of the head, of the row; a row is contiguous. So [B, H, N, D]
// and [B, N, H, D] are one problem with two sets of strides. lse is contiguous.
// flashlab.kernels.problem mirrors struct Problem field by field, and says what a kernel may rely on: 16-byte aligned
// rows, heads a multiple of kv_heads, scale > 0.
#pragma once
#include "simt/names.h"
#include "ptx.cuh"

#ifndef HEAD_DIM                                               // or -DHEAD_DIM=128
#define HEAD_DIM 64
#endif
#ifndef ELEMENT                                                // or -DELEMENT=__nv_bfloat16
#define ELEMENT __half
#endif
using T = ELEMENT;                                             // of q, k, v and o

constexpr int WARP_SIZE = 32;
constexpr int MMA_M = 16, MMA_N = 8, MMA_K = 16;               // mma.m16n8k16: C [16, 8] += A [16, 16] B [16, 8]
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

struct Strides {
    int64_t batch, head, row;
};

struct Problem {
    const void *q, *k, *v;
    void* o;
    float* lse;
    float* workspace;                                          // what workspace_floats() asked for, if there is one
    Strides q_stride, k_stride, v_stride, o_stride;
    int batch, heads, kv_heads, seq_q, seq_k, head_dim;
    int causal;                                                // query i sees the keys up to i + seq_k - seq_q
    float scale;                                               // softmax(scale * q k^T)
    int sms;                                                   // multiprocessors of the device: how many blocks fill it
};

// The rows of one head, from `row` on. In 64 bits: a tensor may have more than 2^31 elements.
__device__ __forceinline__ const T* rows_of(const void* tensor, const Strides& stride, int batch, int head, int row) {
    return (const T*)tensor + batch * stride.batch + head * stride.head + row * stride.row;
}
__device__ __forceinline__ T* rows_of(void* tensor, const Strides& stride, int batch, int head, int row) {
    return (T*)tensor + batch * stride.batch + head * stride.head + row * stride.row;
}

// How many pieces of size b cover a.
__host__ __device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
#include "simt/names_end.h"
