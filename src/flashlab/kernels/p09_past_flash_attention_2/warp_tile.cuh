// warp_tile.cuh - phase 9, what a warp does with a tile of keys, as the first five steps have built it and no later one
// changes. A step includes it behind its constants, which are used here.
//   s [M_TILES][S_TILES][4], acc [M_TILES][O_TILES][4]: accumulators, S and O of 16 M_TILES rows
//   m_i, l_i, m_new [2 M_TILES]: of a lane's rows g, g + 8, g + 16 ...: row r % 2 of tile r / 2

// region: scores
// S = Q K^T. The rows of K are the columns of K^T: ldmatrix without trans gives the B fragment. q_rmem has room for all
// of Q, which is there, or for two fragments of it, which load_q brings.
template <int M_TILES, int S_TILES, int Q_FRAGMENTS, class Load>
__device__ __forceinline__ void scores(float (&s)[M_TILES][S_TILES][4], uint32_t (&q_rmem)[Q_FRAGMENTS][M_TILES][4],
                                       Load load_q, uint32_t k_lane, uint32_t stage) {
    constexpr bool Q_IN_REGISTERS = Q_FRAGMENTS > 2;
    uint32_t b[2][4];                                          // B twice: 16 columns x 16 keys; and the next ones
    if (!Q_IN_REGISTERS) load_q(q_rmem[0], 0);
    ldmatrix_x4(b[0], k_lane + stage);
#pragma unroll
    for (int k = 0; k < HEAD_DIM / MMA_K; k++) {
        const auto& a = q_rmem[Q_IN_REGISTERS ? k : k % 2];
        if (!Q_IN_REGISTERS && k + 1 < HEAD_DIM / MMA_K) load_q(q_rmem[(k + 1) % 2], k + 1);
#pragma unroll
        for (int n = 0; n < S_TILES / 2; n++) {
            const int step = k * (S_TILES / 2) + n;
            const int next_k = (step + 1) / (S_TILES / 2), next_n = (step + 1) % (S_TILES / 2);
            const uint32_t next = (k_lane ^ (next_k * 32)) + stage + next_n * 16 * ROW_BYTES;
            if (next_k < HEAD_DIM / MMA_K) ldmatrix_x4(b[(step + 1) % 2], next);
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {                // one fragment of K, M_TILES of Q
                mma_m16n8k16<T>(s[m][2 * n], a[m], b[step % 2][0], b[step % 2][1]);
                mma_m16n8k16<T>(s[m][2 * n + 1], a[m], b[step % 2][2], b[step % 2][3]);
            }
        }
    }
}
// endregion

// region: row maxima
// m_new: of these scores too, masked beyond `last_key` of a lane's row r. Returns whether one has moved far.
// key: of s[0][0][0].
template <bool MASKED, int M_TILES, int S_TILES, class LastKey>
__device__ __forceinline__ bool row_maxima(float (&m_new)[2 * M_TILES], const float (&m_i)[2 * M_TILES],
                                           float (&s)[M_TILES][S_TILES][4], int key, LastKey last_key,
                                           float scale_log2) {
    bool moved = false;
#pragma unroll
    for (int r = 0; r < 2 * M_TILES; r++) {
        float x = m_i[r];
#pragma unroll
        for (int n = 0; n < S_TILES; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float& c = s[r / 2][n][r % 2 * 2 + e];
                if (MASKED && key + n * MMA_N + e > last_key(r)) c = -INFINITY;
                x = fmaxf(x, c);
            }
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));              // a row lives in the four lanes of a quad
        m_new[r] = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
        moved |= (m_new[r] - m_i[r]) * scale_log2 > RESCALE_ABOVE;     // (NaN is not above)
    }
    return moved;
}
// endregion

// region: rescale
// What was summed under the old maximum is brought under the new one
template <int M_TILES>
__device__ __forceinline__ void rescale(float (&acc)[M_TILES][O_TILES][4], float (&l_i)[2 * M_TILES],
                                        float (&m_i)[2 * M_TILES], const float (&m_new)[2 * M_TILES],
                                        float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2 * M_TILES; r++) {
        const float base = m_new[r] == -INFINITY ? 0.f : m_new[r];     // -inf - (-inf) would be NaN
        const float correction = exp2_approx((m_i[r] - base) * scale_log2);
        m_i[r] = m_new[r], l_i[r] *= correction;
#pragma unroll
        for (int n = 0; n < O_TILES; n++)
            acc[r / 2][n][r % 2 * 2] *= correction, acc[r / 2][n][r % 2 * 2 + 1] *= correction;
    }
}
// endregion

// region: probabilities
// P = exp(S - maximum), in place
template <int M_TILES, int S_TILES>
__device__ __forceinline__ void probabilities(float (&s)[M_TILES][S_TILES][4], float (&l_i)[2 * M_TILES],
                                              const float (&m_i)[2 * M_TILES], float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2 * M_TILES; r++) {
        const float base = (m_i[r] == -INFINITY ? 0.f : m_i[r]) * scale_log2;
#pragma unroll
        for (int n = 0; n < S_TILES; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float& c = s[r / 2][n][r % 2 * 2 + e];
                c = exp2_approx(fmaf(c, scale_log2, -base));
                l_i[r] += c;
            }
    }
}
// endregion

// region: output
// O += P V. Two neighbouring accumulators of S, rounded, are the A fragment of P: no lane needs another's numbers. B
// wants two keys of one column of V in a register, and they lie in two rows: ldmatrix with trans.
template <int M_TILES, int S_TILES>
__device__ __forceinline__ void add_output(float (&acc)[M_TILES][O_TILES][4], const float (&s)[M_TILES][S_TILES][4],
                                           uint32_t v_lane, uint32_t stage) {
#pragma unroll
    for (int k = 0; k < S_TILES / 2; k++) {                    // 16 keys, two tiles of S
        uint32_t a[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            const float(&c)[4] = s[m][2 * k], (&d)[4] = s[m][2 * k + 1];
            a[m][0] = pack<T>(c[0], c[1]), a[m][1] = pack<T>(c[2], c[3]);
            a[m][2] = pack<T>(d[0], d[1]), a[m][3] = pack<T>(d[2], d[3]);
        }
#pragma unroll
        for (int n = 0; n < O_TILES / 2; n++) {
            uint32_t b[4];                                     // B twice: 16 keys x 16 columns of V
            ldmatrix_x4_trans(b, (v_lane ^ (n * 32)) + stage + k * MMA_K * ROW_BYTES);
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                mma_m16n8k16<T>(acc[m][2 * n], a[m], b[0], b[1]);
                mma_m16n8k16<T>(acc[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}
// endregion
