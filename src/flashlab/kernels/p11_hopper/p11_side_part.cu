// Phase 11, beside the ladder: a part of a ring's result. O and lse are float32, and what is there is added to.
//
// In a ring (phase 13) a rank sees its keys shard by shard. p11_flash rounds each part to 16 bits, and another kernel
// merges the parts. Here a consumer reads the o and lse that were found so far, merges its own in, as in phase 0, and
// stores both: nothing is rounded, nothing is launched, and no part is written to memory. An lse of -inf: no key was
// seen so far, and whatever o holds does not count.
//
// Compile with -DHEAD_DIM=64, 80, 96, 112, 128, 160, 192 or 256, and -DELEMENT=__half or __nv_bfloat16; the macros are
// p11_flash's.

        // region: store
        // O and lse
        float* lse = p.lse + ((int64_t)at.batch * p.heads + at.head) * p.seq_q + at.m_start;   // [batch, heads, seq_q]
        // New: straight from the registers: a quad's 8 columns are 32 bytes
        float* o = (float*)p.o + at.batch * p.o_stride.batch + at.head * p.o_stride.head;
#pragma unroll
        for (int r = 0; r < ROWS_PER_LANE; r++) {
            const int row = warp_row + g + r * 8;
            const bool there = at.m_start + row < p.seq_q;
            float sum = l_i[r];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            // New: two finished results, as weights of the sum of both
            const float before = there ? lse[row] : -INFINITY;
            const float mine = sum == 0.f ? -INFINITY : (m_i[r] * scale_log2 + log2f(sum)) * LN2;
            const float top = fmaxf(before, mine), base = top == -INFINITY ? 0.f : top;        // -inf - (-inf) is NaN
            const float a = exp2_approx((before - base) * LOG2E), b = exp2_approx((mine - base) * LOG2E);
            const float keep = a > 0.f ? a / (a + b) : a, factor = sum > 0.f ? b / (a + b) / sum : sum;  // NaN stays
            __syncwarp();                                      // or a lane would read what another one stored
            if (t == 0 && there) lse[row] = top + log2f(a + b) * LN2;
            float* o_row = o + (at.m_start + row) * p.o_stride.row + t * 2;
#pragma unroll
            for (int n = 0; n < O_TILES; n++) {
                float2 x = make_float2(acc[4 * n + 2 * r] * factor, acc[4 * n + 2 * r + 1] * factor);
                float2* place = (float2*)(o_row + n * MMA_N);
                if (there && a > 0.f) x.x += keep * place->x, x.y += keep * place->y;
                if (there) *place = x;
            }
        }
        if (O_IN_Q) {
            named_barrier_sync(1 + CONSUMERS + consumer, GROUP);
            if (first_thread) mbarrier_arrive(empty_q + 8 * q_stage);      // nobody waits for O to leave Q's place
        }
    }
    if (consumer == 0) take_turn();                            // the last turn that was passed on to it
}
// endregion
