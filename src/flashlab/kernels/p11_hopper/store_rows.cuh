// store_rows.cuh - phase 11, steps 4 to 9: the store, as the steps before them have it. A step includes it behind its
// constants, which are used here.

// region: store rows
// O and lse. Each lane stores its pairs of columns of rows `first`, first + 8. first_row: of the tile, of lse [batch,
// heads, seq_q].
__device__ __forceinline__ void store(const Problem& p, T* o_gmem, int64_t first_row, int m_start, int first, int t,
                                      const float (&acc)[O_TILES * 4], const float (&m_i)[ROWS_PER_LANE],
                                      const float (&l_i)[ROWS_PER_LANE], float scale_log2) {
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; r++) {
        const int row = first + r * 8;
        float sum = l_i[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float inverse = sum > 0.f ? 1.f / sum : sum;     // a row that sees no key: 0; NaN stays NaN
        if (m_start + row < p.seq_q) {
            if (t == 0) p.lse[first_row + row] = sum == 0.f ? -INFINITY : (m_i[r] * scale_log2 + log2f(sum)) * LN2;
#pragma unroll
            for (int n = 0; n < O_TILES; n++)
                *(uint32_t*)(o_gmem + row * p.o_stride.row + n * MMA_N + t * 2) =
                    pack<T>(acc[4 * n + 2 * r] * inverse, acc[4 * n + 2 * r + 1] * inverse);
        }
    }
}
// endregion
