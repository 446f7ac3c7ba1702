// Phase 11, beside the ladder: a part of a ring's result. O and lse are float32, and what is there is added to.
//
// In a ring (phase 13) a rank sees its keys shard by shard. p11_flash rounds each part to 16 bits, and another kernel
// merges the parts. Here a consumer reads the o and lse that were found so far, merges its own in, as in phase 0, and
// stores both: nothing is rounded, nothing is launched, and no part is written to memory. An lse of -inf: no key was
// seen so far, and whatever o holds does not count.
//
// Without a mask all parts are equal, and the last round of them rarely fills the GPU: 4096 parts are 31 rounds of 132
// blocks, and one of 4. So the parts of the last rounds are cut by their keys: half of the tiles, a quarter, and so on,
// the long pieces of all parts before the short ones. What merges into o can merge its pieces too, each in its turn.
//
// Compile with -DHEAD_DIM=64, 80, 96, 112, 128, 160, 192 or 256, and -DELEMENT=__half or __nv_bfloat16; the macros are
// p11_flash's.

// region: part
// A head's rows, and tiles of keys that some of them see. New: place, where its turns are; -1: it has not been cut
struct __align__(16) Part { int batch, head, m_start, end, begin = 0, piece = 0, place = -1; };
#ifndef WHOLE
#define WHOLE 64                                               // New: tiles; what has twice as many is cut
#endif
// endregion

    // region: parts
    const int m_blocks = ceil_div(p.seq_q, BLOCK_M), all = m_blocks * p.batch * p.heads, rounds = all / (int)gridDim.x;
    int halved = 0;                                            // New: how often the last parts are
    if (!CAUSAL && asks<Tile>(p)) while (ceil_div(p.seq_k, BLOCK_N) >> halved >= 2 * WHOLE) halved++;
    const int whole = halved ? (rounds - 1) * gridDim.x : all, cut = all - whole, parts = whole + cut * (halved + 1);
    // endregion

                // region: next part
                Part here{0, 0, 0, -1};
                if (part < whole) here = part_of(part);
                else if (part < parts) {                       // New
                    const int place = (part - whole) % cut, piece = (part - whole) / cut;
                    here = part_of(whole + place);
                    here.place = place, here.piece = piece;
                    here.end >>= piece, here.begin = piece < halved ? here.end / 2 : 0;
                }
                // endregion

                // region: tiles of a part
                for (int j = here.end - 1; j >= here.begin; j--, nth++) {
                    // endregion

        // region: mine
        // New: of a piece that does not begin with the first key, every consumer takes all
        const int mine = at.begin > 0 || first_row < p.seq_q ? min(at.end, end_of(first_row + 64)) : 0;
        // endregion

            // region: full tiles
            for (; j >= at.begin; j--) tile(j, std::false_type{}, std::false_type{});  // the full ones
            // endregion

        // region: store
        // New: a piece waits for the one before it, which began before it
        int* turn = (int*)p.workspace + 1 + at.place * CONSUMERS + consumer;
        if (at.place >= 0) {
            if (first_thread) {
                while (atomicAdd(turn, 0) != at.piece) {}
                __threadfence();                               // its o and lse come before what is read now
            }
            named_barrier_sync(1 + CONSUMERS + consumer, GROUP);
        }
        // region: merge
        float inverse[ROWS_PER_LANE];
        last_sums(inverse, l_i);
        // O and lse
        float* lse = lse_of(p, at);                            // [BLOCK_M]
        // New: straight from the registers: a quad's 8 columns are 32 bytes
        float* o = (float*)p.o + at.batch * p.o_stride.batch + at.head * p.o_stride.head;
        float before[ROWS_PER_LANE];                           // New: both on their way at once
        const int first = warp_row + g, rows = p.seq_q - at.m_start;
#pragma unroll
        for (int r = 0; r < ROWS_PER_LANE; r++) before[r] = first + r * 8 < rows ? lse[first + r * 8] : -INFINITY;
#pragma unroll
        for (int r = 0; r < ROWS_PER_LANE; r++) {
            const int row = first + r * 8;
            const bool there = row < rows;
            // New: two finished results, as weights of the sum of both
            const float mine = l_i[r] == 0.f ? -INFINITY : (m_i[r] * scale_log2 + __log2f(l_i[r])) * LN2;
            const float top = fmaxf(before[r], mine), base = top == -INFINITY ? 0.f : top;    // -inf - (-inf) is NaN
            const float a = exp2_approx((before[r] - base) * LOG2E), b = exp2_approx((mine - base) * LOG2E);
            const float keep = a > 0.f ? a / (a + b) : a, factor = l_i[r] > 0.f ? b / (a + b) * inverse[r] : l_i[r];
            __syncwarp();                                      // or a lane would read what another one stored
            if (t == 0 && there) lse[row] = top + __log2f(a + b) * LN2;
            float2* o_row = (float2*)(o + (at.m_start + row) * p.o_stride.row) + t;
            float2 was[O_TILES];                               // many loads, one latency: a store holds up the next
#pragma unroll
            for (int n = 0; n < O_TILES; n++) was[n] = there && a > 0.f ? o_row[n * MMA_N / 2] : float2{};
#pragma unroll
            for (int n = 0; n < O_TILES; n++)
                if (there) o_row[n * MMA_N / 2] = make_float2(fmaf(keep, was[n].x, acc[4 * n + 2 * r] * factor),
                                                              fmaf(keep, was[n].y, acc[4 * n + 2 * r + 1] * factor));
        }
        // endregion
        if (at.place >= 0) {                                   // New
            named_barrier_sync(1 + CONSUMERS + consumer, GROUP);
            if (first_thread) __threadfence(), atomicAdd(turn, 1);
        }
    }
    if (consumer == 0) take_turn();                            // the last turn that was passed on to it
}
// endregion

// region: workspace
extern "C" int64_t workspace_floats(const Problem* p) { return 1 + 2 * TALL * p->sms; }    // the counter, and turns
// endregion

        // region: clear the counter
        cudaMemsetAsync(p.workspace, 0, workspace_floats(&p) * sizeof(int), (cudaStream_t)stream);     // New: and turns
        // endregion
