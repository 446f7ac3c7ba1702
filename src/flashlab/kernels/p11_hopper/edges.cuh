// edges.cuh - phase 11, the last step: what a part has to do besides its full tiles.

// region: hide
// Scores that a row does not see become -inf. Of a row a lane has two of every MMA_N columns, one bit for each: seven
// bits become predicates by one instruction, a comparison is one for each score. first_row, first_key: of the lane's
// first score, among all of its head.
template <bool CAUSAL>
__device__ __forceinline__ void hide(float (&s)[S_TILES * 4], const Problem& p, int first_row, int first_key) {
    static_assert(2 * S_TILES <= 32);
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; r++) {
        const int last_key = CAUSAL ? min(p.seq_k - 1, first_row + r * 8 + p.seq_k - p.seq_q) : p.seq_k - 1;
        const int left = last_key - first_key;                 // column n * MMA_N + e is seen if that is not above left
        const int seen = left < 0 ? 0 : left / MMA_N * 2 + min(left % MMA_N + 1, 2);
        const uint32_t bits = seen < 32 ? (1u << seen) - 1 : ~0u;
#pragma unroll
        for (int i = 0; i < 2 * S_TILES; i++)
            if (!(bits & 1u << i)) s[i / 2 * 4 + 2 * r + i % 2] = -INFINITY;
    }
}
// endregion

// region: last sums of a row
// l_i becomes a row's sum over its four lanes; inverse is what O is multiplied by. Without a branch: no other work of
// this consumer's hides how long that takes. A row that sees no key: 0; NaN stays NaN. (No sum is near what the
// approximation takes for 0 or infinity: 2^-126 and 2^126.)
__device__ __forceinline__ void last_sums(float (&inverse)[ROWS_PER_LANE], float (&l_i)[ROWS_PER_LANE]) {
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; r++) {
        l_i[r] += __shfl_xor_sync(~0u, l_i[r], 1);
        l_i[r] += __shfl_xor_sync(~0u, l_i[r], 2);
        inverse[r] = l_i[r] > 0.f ? rcp_approx(l_i[r]) : l_i[r];
    }
}
// endregion

// region: store lse
__device__ __forceinline__ float* lse_of(const Problem& p, const Part& at) {       // of the part's rows
    return p.lse + ((int64_t)at.batch * p.heads + at.head) * p.seq_q + at.m_start;
}
// To be called behind O's store, whose proxy fence waits for all that a thread has stored before: also to memory.
// first_row: the lane's, in the part.
__device__ __forceinline__ void store_lse(const Problem& p, const Part& at, const float (&l_i)[ROWS_PER_LANE],
                                          const float (&m_i)[ROWS_PER_LANE], int first_row, int t, float scale_log2) {
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; r++) {
        const int row = first_row + r * 8;
        const float x = (m_i[r] * scale_log2 + __log2f(l_i[r])) * LN2;
        if (t == 0 && at.m_start + row < p.seq_q) lse_of(p, at)[row] = l_i[r] == 0.f ? -INFINITY : x;
    }
}
// endregion
