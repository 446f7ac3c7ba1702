// one_tile.cuh - phase 12, what step 5 has built and no later one changes: what a warp does with a tile of keys, and
// what it all adds up to. A step includes it behind its constants, which are used here.

// region: swizzle
// Element (row, column) of a tile of shared memory, in bytes from its start; column is a multiple of 8.
__device__ __forceinline__ int at(int row, int column) { return row * ROW_BYTES + (column / 8 ^ row % 8) * 16; }
// endregion

// region: state
struct State {                                                 // c0 c1 | c2 c3: columns 2t, 2t + 1 of row g | g + 8
    float acc[O_TILES][4];                                     // O, not yet divided by l_i
    float m_i[2], l_i[2];                                      // of rows g, g + 8: references of P, in log2 units; sums
};
constexpr float RESCALE_ABOVE = 8.f;                           // how far a maximum may be above its reference
// endregion

// region: one tile
// 16 keys, from `start` on, for 16 rows, from shared memory by ldmatrix. `last_key`: the last that row g, and g + 8,
// sees.
__device__ __forceinline__ void take(State& x, const uint32_t (&q_rmem)[HEAD_DIM / MMA_K][4], uint32_t k_lane,
                                     uint32_t v_lane, int start, const int (&last_key)[2], float scale_log2, int t) {
    // region: scores
    float s[2][4] = {}, odd[2][4] = {};                        // 16 rows x 16 keys; two sums wait half as long as one
#pragma unroll
    for (int k = 0; k < HEAD_DIM / MMA_K; k++) {
        uint32_t b[4];                                         // B twice: 16 columns x 16 keys
        ldmatrix_x4(b, k_lane ^ (k * 32));
        mma_m16n8k16<T>(k % 2 ? odd[0] : s[0], q_rmem[k], b[0], b[1]);
        mma_m16n8k16<T>(k % 2 ? odd[1] : s[1], q_rmem[k], b[2], b[3]);
    }
#pragma unroll
    for (int e = 0; e < 8; e++) s[e / 4][e % 4] += odd[e / 4][e % 4];
    // endregion
    // region: row maxima
    bool doubt = false;                                        // whether a P of this lane would be above 2^8
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float& e = s[n / 2][r * 2 + n % 2];
            e = start + n / 2 * MMA_N + t * 2 + n % 2 <= last_key[r] ? e * scale_log2 : -INFINITY;
            doubt |= e > x.m_i[r] + RESCALE_ABOVE;
        }
    // endregion
    // region: rescale
    if (__any_sync(~0u, doubt)) {                              // seldom, after the first tiles
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float m_new = x.m_i[r];
#pragma unroll
            for (int n = 0; n < 4; n++) m_new = fmaxf(m_new, s[n / 2][r * 2 + n % 2]);
            m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 1));              // a row lives in four lanes
            m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 2));
            const float base = m_new == -INFINITY ? 0.f : m_new;               // -inf - (-inf) would be NaN
            const float correction = exp2_approx(x.m_i[r] - base);
            x.m_i[r] = m_new, x.l_i[r] *= correction;
#pragma unroll
            for (int n = 0; n < O_TILES; n++) x.acc[n][r * 2] *= correction, x.acc[n][r * 2 + 1] *= correction;
        }
    }
    // endregion
    // region: probabilities
    // P = exp(S - reference), in place. Two neighbouring accumulators, rounded, are the A fragment of P.
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float base = x.m_i[r] == -INFINITY ? 0.f : x.m_i[r];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float& e = s[n / 2][r * 2 + n % 2];
            e = exp2_approx(e - base), x.l_i[r] += e;
        }
    }
    const uint32_t a[4] = {pack<T>(s[0][0], s[0][1]), pack<T>(s[0][2], s[0][3]), pack<T>(s[1][0], s[1][1]),
                           pack<T>(s[1][2], s[1][3])};
    // endregion
    // region: output
#pragma unroll
    for (int n = 0; n < O_TILES / 2; n++) {
        uint32_t b[4];                                         // B twice: 16 keys x 16 columns of V
        ldmatrix_x4_trans(b, v_lane ^ (n * 32));
        mma_m16n8k16<T>(x.acc[2 * n], a, b[0], b[1]);
        mma_m16n8k16<T>(x.acc[2 * n + 1], a, b[2], b[3]);
    }
    // endregion
}
// endregion

// region: sum
// Four columns of a row and what they weigh: m is the reference in log2 units, l the sum, of parts that were merged.
struct Sum {
    float m, l;
    float4 o;
};
// Divided by its weight; and its lse, in log2 units. A row that saw no key is 0 and -inf.
__device__ __forceinline__ float finish(Sum& sum) {
    const float inverse = sum.l == 0.f ? 0.f : rcp_approx(sum.l);
    sum.o.x *= inverse, sum.o.y *= inverse, sum.o.z *= inverse, sum.o.w *= inverse;
    return sum.m + __log2f(sum.l);
}
__device__ __forceinline__ void store(const Cache& c, int b, int kv_head, int r, int quad, Sum& sum) {
    const float lse = finish(sum);
    const uint2 o = make_uint2(pack<T>(sum.o.x, sum.o.y), pack<T>(sum.o.z, sum.o.w));
    *(uint2*)(o_row(c, b, kv_head, r) + quad * 4) = o;
    if (quad == 0) c.lse[lse_row(c, b, kv_head, r)] = lse * LN2;
}
// endregion
