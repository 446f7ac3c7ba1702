// scores_again.cuh - phase 11, what step 14 has built and no later one changes. Included behind the constants.

// region: scores again
// S = Q K^T by one warp, with phase 8's instructions. q_rows: where the consumer's rows of Q begin
template <int BLOCK_M>
__device__ __forceinline__ void scores_again(float (&s)[S_TILES * 4], uint32_t q_rows, uint32_t k_rows) {
    const int l = threadIdx.x % WARP_SIZE, l8 = l % 8, row = threadIdx.x % GROUP / WARP_SIZE * MMA_M + l % 16;
    for (float& x : s) x = 0.f;
#pragma unroll 1
    for (int column = 0; column < HEAD_DIM; column += MMA_K) {
        const int slab = column / SLAB, chunk = column % SLAB / 8;         // of 16 bytes
        uint32_t q_rmem[4], k_rmem[4];
        ldmatrix_x4(q_rmem, q_rows + (slab * BLOCK_M + row) * SLAB_ROW + (chunk + l / 16 ^ l8 / LINE) * 16);
#pragma unroll
        for (int n = 0; n < S_TILES; n += 2) {
            const int key = n * MMA_N + l / 16 * 8 + l8;
            ldmatrix_x4(k_rmem, k_rows + (slab * BLOCK_N + key) * SLAB_ROW + (chunk + l / 8 % 2 ^ l8 / LINE) * 16);
            mma_m16n8k16<T>((float(&)[4])s[4 * n], q_rmem, k_rmem[0], k_rmem[1]);
            mma_m16n8k16<T>((float(&)[4])s[4 * n + 4], q_rmem, k_rmem[2], k_rmem[3]);
        }
    }
    __syncwarp();                                          // before one lane says that K has been read
}
// endregion
