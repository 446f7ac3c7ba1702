// Phase 8, beside the ladder: O leaves in pieces of 16 bytes, by shuffles.
//
// p8_6_store without its shared memory: a quad of lanes holds 8 neighbouring columns of O in each accumulator, 4 bytes
// per lane. Four accumulators are four such rows of 16 bytes; the lanes trade until each has one of them whole.
//
// Compile with -DHEAD_DIM=64 or 128, and -DELEMENT=__half or __nv_bfloat16, -DSTAGES=1, 2 or 3.

    // region: store
    // O and lse. A lane stores 8 neighbouring columns of every fourth accumulator.
    const int64_t first_row = (int64_t)head_index * p.seq_q + m_start;         // of lse [batch, heads, seq_q]
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; r++) {
        const int row = warp_row + g + r * 8;
        float sum = l_i[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float inverse = sum > 0.f ? 1.f / sum : sum;     // a row that sees no key: 0; NaN stays NaN
        const bool exists = m_start + row < p.seq_q;
        if (t == 0 && exists)
            p.lse[first_row + row] = sum == 0.f ? -INFINITY : (m_i[r] * scale_log2 + log2f(sum)) * LN2;
        uint32_t o[O_TILES];                                   // columns 8 n + 2t, and + 1
#pragma unroll
        for (int n = 0; n < O_TILES; n++) o[n] = pack<T>(acc[n][2 * r] * inverse, acc[n][2 * r + 1] * inverse);
#pragma unroll
        for (int n = 0; n < O_TILES; n += 4) {                 // New: lane t gathers the 8 columns of accumulator n + t
            uint32_t x[4] = {};                                // from lane i of the quad: x[i]
#pragma unroll
            for (int round = 0; round < 4; round++) {          // lanes t and t ^ round trade
                const int other = t ^ round;
                const uint32_t low = other == 0 ? o[n] : o[n + 1], high = other == 2 ? o[n + 2] : o[n + 3];
                const uint32_t got = __shfl_xor_sync(~0u, other < 2 ? low : high, round);
#pragma unroll
                for (int i = 0; i < 4; i++) x[i] = i == other ? got : x[i];
            }
            if (exists) *(uint4*)(o_gmem + row * p.o_stride.row + (n + t) * 8) = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
}
// endregion
