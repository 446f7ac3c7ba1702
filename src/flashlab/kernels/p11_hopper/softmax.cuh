// softmax.cuh - phase 11, steps 2 to 10: the softmax of a tile, as phase 9 has it, of scores as wgmma leaves them. A
// step includes it behind its constants, which are used here.
//   s [4 S_TILES]: S, which becomes P; m_i, m_new, l_i [ROWS_PER_LANE]: of the lane's rows

// region: row maxima
// m_new: the maxima with these scores, masked beyond last_key(r) of the lane's row r. first_key: of the tile.
template <bool MASKED, class LastKey>
__device__ __forceinline__ void row_maxima(float (&m_new)[ROWS_PER_LANE], const float (&m_i)[ROWS_PER_LANE],
                                           float (&s)[S_TILES * 4], int first_key, int t, LastKey last_key) {
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; r++) {
        const int last = last_key(r);
        float x = m_i[r];
#pragma unroll
        for (int n = 0; n < S_TILES; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float& c = s[4 * n + 2 * r + e];
                if (MASKED && first_key + n * MMA_N + t * 2 + e > last) c = -INFINITY;
                x = fmaxf(x, c);
            }
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));              // a row lives in the four lanes of a quad
        m_new[r] = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
    }
}
// endregion

// region: probabilities
// P = exp(S - maximum), in place
__device__ __forceinline__ void probabilities(float (&s)[S_TILES * 4], float (&l_i)[ROWS_PER_LANE],
                                              const float (&m_i)[ROWS_PER_LANE], float scale_log2) {
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; r++) {
        const float base = (m_i[r] == -INFINITY ? 0.f : m_i[r]) * scale_log2;
#pragma unroll
        for (int n = 0; n < S_TILES; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float& c = s[4 * n + 2 * r + e];
                c = exp2_approx(fmaf(c, scale_log2, -base));
                l_i[r] += c;
            }
    }
}
// endregion
