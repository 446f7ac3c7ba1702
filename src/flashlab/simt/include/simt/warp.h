// Barriers and the operations in which the lanes of a warp meet. Each is one call into the runtime, which
// lets the other lanes run until all have arrived (runtime/collectives.cpp).
#pragma once
#include "language.h"

enum SimtOp {
    SIMT_SYNCWARP,
    SIMT_SHUFFLE,
    SIMT_VOTE,
    SIMT_MATCH,
    SIMT_REDUCE,
    SIMT_ELECT,
    SIMT_LDMATRIX,
    SIMT_STMATRIX,
    SIMT_MMA,
    SIMT_WGMMA,
    SIMT_WGMMA_FENCE,
    SIMT_WGMMA_COMMIT,
    SIMT_WGMMA_WAIT,
    SIMT_SETMAXNREG,
};
enum SimtShuffle { SIMT_SHFL_IDX, SIMT_SHFL_XOR, SIMT_SHFL_UP, SIMT_SHFL_DOWN };
enum SimtVote { SIMT_BALLOT, SIMT_ANY, SIMT_ALL, SIMT_UNI };
enum SimtReduce { SIMT_ADD, SIMT_MIN, SIMT_MAX, SIMT_AND, SIMT_OR, SIMT_XOR };
enum SimtBarrier { SIMT_BAR_PLAIN, SIMT_BAR_COUNT, SIMT_BAR_AND, SIMT_BAR_OR };
struct SimtShuffleIn {
    uint64_t value;
    int arg, width, kind;
};

extern "C" {
int simt_barrier(int kind, int predicate);
void simt_named_barrier(int id, int threads, int wait);
void simt_warp(int op, unsigned mask, const void* in, void* out, int param);
unsigned simt_activemask(int line);
}

SIMT_INLINE void __syncthreads() { simt_barrier(SIMT_BAR_PLAIN, 0); }
SIMT_INLINE int __syncthreads_count(int p) { return simt_barrier(SIMT_BAR_COUNT, p); }
SIMT_INLINE int __syncthreads_and(int p) { return simt_barrier(SIMT_BAR_AND, p); }
SIMT_INLINE int __syncthreads_or(int p) { return simt_barrier(SIMT_BAR_OR, p); }
SIMT_INLINE void __syncwarp(unsigned mask = 0xffffffffu) { simt_warp(SIMT_SYNCWARP, mask, nullptr, nullptr, 0); }
// The line of the call, because a compiler may make two instructions of it.
SIMT_INLINE unsigned __activemask(int line = __builtin_LINE()) { return simt_activemask(line); }

template <class T>
SIMT_INLINE T simt_shuffle(unsigned mask, T value, int arg, int width, int kind) {
    static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8,
                  "a shuffle moves 1, 2, 4 or 8 bytes a lane");
    SimtShuffleIn in = {0, arg, width, kind};
    memcpy(&in.value, &value, sizeof(T));
    uint64_t got;
    simt_warp(SIMT_SHUFFLE, mask, &in, &got, sizeof(T));
    memcpy(&value, &got, sizeof(T));
    return value;
}
template <class T>
SIMT_INLINE T __shfl_sync(unsigned m, T v, int lane, int width = 32) {
    return simt_shuffle(m, v, lane, width, SIMT_SHFL_IDX);
}
template <class T>
SIMT_INLINE T __shfl_xor_sync(unsigned m, T v, int bits, int width = 32) {
    return simt_shuffle(m, v, bits, width, SIMT_SHFL_XOR);
}
template <class T>
SIMT_INLINE T __shfl_up_sync(unsigned m, T v, unsigned d, int width = 32) {
    return simt_shuffle(m, v, (int)d, width, SIMT_SHFL_UP);
}
template <class T>
SIMT_INLINE T __shfl_down_sync(unsigned m, T v, unsigned d, int width = 32) {
    return simt_shuffle(m, v, (int)d, width, SIMT_SHFL_DOWN);
}

SIMT_INLINE unsigned simt_vote(unsigned mask, int predicate, int kind) {
    unsigned out;
    simt_warp(SIMT_VOTE, mask, &predicate, &out, kind);
    return out;
}
SIMT_INLINE unsigned __ballot_sync(unsigned m, int p) { return simt_vote(m, p, SIMT_BALLOT); }
SIMT_INLINE int __any_sync(unsigned m, int p) { return (int)simt_vote(m, p, SIMT_ANY); }
SIMT_INLINE int __all_sync(unsigned m, int p) { return (int)simt_vote(m, p, SIMT_ALL); }
SIMT_INLINE int __uni_sync(unsigned m, int p) { return (int)simt_vote(m, p, SIMT_UNI); }

template <class T>
SIMT_INLINE unsigned simt_match(unsigned mask, T value, int all, int* same) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a match compares 4 or 8 bytes a lane");
    uint64_t in = 0;
    memcpy(&in, &value, sizeof(T));
    unsigned out[2];
    simt_warp(SIMT_MATCH, mask, &in, out, all);
    if (same) *same = (int)out[1];
    return out[0];
}
template <class T>
SIMT_INLINE unsigned __match_any_sync(unsigned m, T v) {
    return simt_match(m, v, 0, nullptr);
}
template <class T>
SIMT_INLINE unsigned __match_all_sync(unsigned m, T v, int* same) {
    return simt_match(m, v, 1, same);
}

SIMT_INLINE unsigned simt_reduce(unsigned mask, unsigned value, int kind, int is_signed) {
    unsigned out;
    simt_warp(SIMT_REDUCE, mask, &value, &out, kind | is_signed << 4);
    return out;
}
SIMT_INLINE unsigned __reduce_add_sync(unsigned m, unsigned v) { return simt_reduce(m, v, SIMT_ADD, 0); }
SIMT_INLINE unsigned __reduce_min_sync(unsigned m, unsigned v) { return simt_reduce(m, v, SIMT_MIN, 0); }
SIMT_INLINE unsigned __reduce_max_sync(unsigned m, unsigned v) { return simt_reduce(m, v, SIMT_MAX, 0); }
SIMT_INLINE int __reduce_add_sync(unsigned m, int v) { return (int)simt_reduce(m, (unsigned)v, SIMT_ADD, 1); }
SIMT_INLINE int __reduce_min_sync(unsigned m, int v) { return (int)simt_reduce(m, (unsigned)v, SIMT_MIN, 1); }
SIMT_INLINE int __reduce_max_sync(unsigned m, int v) { return (int)simt_reduce(m, (unsigned)v, SIMT_MAX, 1); }
SIMT_INLINE unsigned __reduce_and_sync(unsigned m, unsigned v) { return simt_reduce(m, v, SIMT_AND, 0); }
SIMT_INLINE unsigned __reduce_or_sync(unsigned m, unsigned v) { return simt_reduce(m, v, SIMT_OR, 0); }
SIMT_INLINE unsigned __reduce_xor_sync(unsigned m, unsigned v) { return simt_reduce(m, v, SIMT_XOR, 0); }
