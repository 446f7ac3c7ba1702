// maxima.cuh - phase 11, what step 11 has built and no later one changes. A step includes it behind its constants,
// which it uses.

// region: row maxima
// m_new: the maxima with these scores, masked where a row does not see them. moved: one has moved far.
// first_row: of the lane; first_key: of the tile.
template <bool CAUSAL, bool MASKED>
__device__ __forceinline__ void row_maxima(float (&m_new)[ROWS_PER_LANE], bool& moved, float (&s)[S_TILES * 4],
                                           const float (&m_i)[ROWS_PER_LANE], const Problem& p, int first_row,
                                           int first_key, int t, float scale_log2) {
    moved = false;
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; r++) {
        const int row = first_row + r * 8, diagonal = p.seq_k - p.seq_q;
        const int last_key = CAUSAL ? min(p.seq_k - 1, row + diagonal) : p.seq_k - 1;
        float x = m_i[r];
#pragma unroll
        for (int n = 0; n < S_TILES; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (MASKED && first_key + n * MMA_N + t * 2 + e > last_key) s[4 * n + 2 * r + e] = -INFINITY;
            x = fmaxf(x, fmaxf(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]));       // half as long a chain
        }
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));              // a row lives in the four lanes of a quad
        m_new[r] = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
        moved |= (m_new[r] - m_i[r]) * scale_log2 > RESCALE_ABOVE;             // (NaN is not above)
    }
}
// endregion
