// Phase 11, beside the ladder: O is divided by the sum of the weights that it was computed from, the rounded ones.
//
// p11_flash rounds P to 16 bits for the product with V, and divides by the sum of P as it was before. Where one key
// dominates a row, and its weight is not exactly 1 because the maximum is of older tiles, that weight's rounding is an
// error of the whole row. Divided by the sum of the rounded weights it cancels. lse keeps the exact sum: a backward
// pass computes P from it.
//
// Compile with -DHEAD_DIM=64, 80, 96, 112, 128, 160, 192 or 256, and -DELEMENT=__half or __nv_bfloat16; the macros are
// p11_flash's.

    // region: state
    // c0 c1 | c2 c3 of an accumulator: columns 2t, 2t + 1 of row g | of row g + 8
    float acc[O_TILES * 4];                                    // O, not yet divided by l_o
    float m_i[ROWS_PER_LANE];                                  // the rows' maxima, of the raw scores
    float l_i[ROWS_PER_LANE];                                  // their sums, over this lane's columns
    float l_o[ROWS_PER_LANE] = {}, tile_o[ROWS_PER_LANE];      // New: of the rounded weights; of this tile's
    const uint32_t o_lane = o_smem + (warp_row + lane % 16) * SLAB_ROW;    // the row that it gives to stmatrix
    const float scale_log2 = p.scale * LOG2E;                  // exp(x) is computed as exp2(x * log2(e))
    // endregion

        // region: rescale
        // What was summed under the old maximum is brought under the new one: O later, when it is there. All rows of
        // a warp together, so a row's bits depend on the 15 others
        float correction[ROWS_PER_LANE];
        auto rescale = [&] {
            moved = __any_sync(~0u, moved);
            if (!moved) return;
#pragma unroll
            for (int r = 0; r < ROWS_PER_LANE; r++) {
                const float base = m_new[r] == -INFINITY ? 0.f : m_new[r];     // -inf - (-inf) would be NaN
                correction[r] = exp2_approx((m_i[r] - base) * scale_log2);
                m_i[r] = m_new[r], l_i[r] *= correction[r], l_o[r] *= correction[r];           // New: l_o
            }
        };
        // endregion

        // region: probabilities
        // P = exp(S - maximum), in place, of the MMA tiles from one to before another
        auto probabilities = [&](int from, int to) {
            if (from == 0) sums[0] = sums[1] = 0.f;
            float sum[ROWS_PER_LANE][2] = {{sums[0]}, {sums[1]}};
#pragma unroll
            for (int n = from; n < to; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float& c = s[4 * n + i];
                    const float base = (m_i[i / 2] == -INFINITY ? 0.f : m_i[i / 2]) * scale_log2;
                    const float x = fmaf(c, scale_log2, -base);
                    const bool by_polynomial = POLYNOMIAL > 0 && n % max(1, POLYNOMIAL) == 0;
                    c = by_polynomial ? exp2_polynomial(x) : exp2_approx(x);
                    sum[i / 2][i % 2] += c;                    // two chains
                }
            for (int r = 0; r < ROWS_PER_LANE; r++) sums[r] = sum[r][0] + sum[r][1];
        };
        // Two neighbouring accumulators of S, rounded, are the A fragment of P: no lane needs another's numbers.
        auto round_p = [&](int from, int to) {
            if (from == 0) tile_o[0] = tile_o[1] = 0.f;        // New: again, after a doubt
            float sum[ROWS_PER_LANE][2] = {{tile_o[0]}, {tile_o[1]}};
#pragma unroll
            for (int i = 2 * from; i < 2 * to; i++) {
                p_rmem[i / 4][i % 4] = pack<T>(s[2 * i], s[2 * i + 1]);
                const float2 weights = unpack<T>(p_rmem[i / 4][i % 4]);
                sum[i % 2][0] += weights.x, sum[i % 2][1] += weights.y;
            }
            for (int r = 0; r < ROWS_PER_LANE; r++) {
                tile_o[r] = sum[r][0] + sum[r][1];
                if (to == S_TILES) l_o[r] = FIRST ? tile_o[r] : l_o[r] + tile_o[r];
            }
        };
        // endregion

        // region: last sums
        float inverse[ROWS_PER_LANE];
        last_sums(inverse, l_i);
        last_sums(inverse, l_o);                               // New: what O is divided by
        // endregion
