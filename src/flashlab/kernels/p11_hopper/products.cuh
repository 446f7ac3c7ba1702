// products.cuh - phase 11, what steps 2 and 3 have built: the products of a tile, which no later step changes. A step
// includes it behind its constants, which are used here.

// region: issue scores
// S = Q K^T. The rows of K are the columns of K^T. Lanes hold it as MMA tiles side by side: c0 c1 c2 c3 of tile n are
// s[4 n] ... s[4 n + 3].
template <int BLOCK_M>
__device__ __forceinline__ void issue_scores(float (&s)[S_TILES * 4], uint64_t q_operand, uint64_t k_operand) {
    wgmma_fence();                                             // the registers of s are the tensor cores' from here on
#pragma unroll
    for (int k = 0; k < HEAD_DIM / MMA_K; k++)                 // the first one overwrites s
        wgmma_ss<BLOCK_N, T>(s, q_operand + columns_on<BLOCK_M>(k), k_operand + columns_on<BLOCK_N>(k), k > 0);
    wgmma_commit();
}
// endregion

// region: issue output
// O += P V
__device__ __forceinline__ void issue_output(float (&acc)[O_TILES * 4], const uint32_t (&p_rmem)[BLOCK_N / MMA_K][4],
                                             uint64_t v_operand) {
    wgmma_fence();                                             // acc and p_rmem were written by their lanes
#pragma unroll
    for (int k = 0; k < BLOCK_N / MMA_K; k++) wgmma_rs<HEAD_DIM, T, true>(acc, p_rmem[k], v_operand + rows_on(k));
    wgmma_commit();
}
// endregion
