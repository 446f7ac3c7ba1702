// store_output.cuh - phase 11, steps 11 to the last: the store of O by way of shared memory, as step 10 has it. In the
// form of the last step, where there may be no room for all of it.

// region: store output
// 64 rows of o_smem are this consumer's alone; o_lane is the row that a lane gives to stmatrix. Its 128 threads have a
// barrier too, behind those of turns. STEP columns leave at a time, through one of PLACES after the other.
template <int BLOCK_M, int CONSUMERS, int STEP = HEAD_DIM, int PLACES = 1>
__device__ __forceinline__ void store_output(const float (&acc)[O_TILES * 4], const float (&inverse)[ROWS_PER_LANE],
                                             const CUtensorMap& o_map, uint32_t o_smem, uint32_t o_lane, int lane,
                                             int consumer, bool first_thread, int first_row, int head, int batch) {
#pragma unroll
    for (int from = 0, place = 0; from < HEAD_DIM; from += STEP, place = (place + 1) % PLACES) {
        // What was here has been read: all but the latest PLACES - 1. Where the part before has ended does not count
        if (first_thread) from == 0 ? bulk_wait_read<0>() : bulk_wait_read<PLACES - 1>();
        named_barrier_sync(1 + CONSUMERS + consumer, GROUP);
#pragma unroll
        for (int n = from / MMA_N; n < min(from + STEP, HEAD_DIM) / MMA_N; n += 2) {   // 16 rows x 16 columns, per warp
            uint32_t o_rmem[4];
            for (int i = 0; i < 4; i++)
                o_rmem[i] = pack<T>(acc[4 * n + 2 * i] * inverse[i % 2], acc[4 * n + 2 * i + 1] * inverse[i % 2]);
            const int column = n * MMA_N - from + place * STEP + lane / 16 * 8;        // in o_smem
            const int chunk = column % SLAB / 8 ^ lane % 8 / LINE;
            stmatrix_x4(o_lane + column / SLAB * BLOCK_M * SLAB_ROW + chunk * 16, o_rmem);
        }
        fence_proxy_async();                                   // or the copy engine might not see what was stored
        named_barrier_sync(1 + CONSUMERS + consumer, GROUP);
        if (first_thread) {                                    // what does not exist is not written
            for (int c = 0; c < min(STEP, HEAD_DIM - from); c += SLAB)
                tma_store(&o_map, o_smem + ((place * STEP + c) / SLAB * BLOCK_M + consumer * 64) * SLAB_ROW, from + c,
                          first_row, head, batch);
            bulk_commit();
        }
    }
}
// endregion
