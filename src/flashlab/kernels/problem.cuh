// problem.cuh - one attention problem, as the host hands it to every kernel of the series.
//
//   q [batch, heads, seq_q, head_dim], k and v [batch, kv_heads, seq_k, head_dim], o like q, lse [batch, heads, seq_q].
// A tensor has three strides, in elements: of the batch, of the head, of the row; a row is contiguous. So [B, H, N, D]
// and [B, N, H, D] are one problem with two sets of strides. lse is contiguous.
// flashlab.cuda.problem mirrors this struct field by field, and says what a kernel may rely on: 16-byte aligned rows,
// heads a multiple of kv_heads, scale > 0.
#pragma once
#include "simt.h"
#include <stdint.h>

struct Strides {
    int64_t batch, head, row;
};

struct Problem {
    const void *q, *k, *v;
    void* o;
    float* lse;
    float* workspace;            // what workspace_floats() asked for
    Strides q_stride, k_stride, v_stride, o_stride;
    int batch, heads, kv_heads, seq_q, seq_k, head_dim;
    int causal;                  // query i sees the keys up to i + seq_k - seq_q
    float scale;                 // softmax(scale * q k^T)
    int sms;                     // multiprocessors of the device: how many blocks fill it
};

// The rows of one head, from `row` on. In 64 bits: a tensor may have more than 2^31 elements.
template <class T>
__device__ __forceinline__ T* rows_of(T* tensor, const Strides& stride, int batch, int head, int row) {
    return tensor + batch * stride.batch + head * stride.head + row * stride.row;
}
