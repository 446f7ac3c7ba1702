// launch.cuh - phase 11, steps 2 to 7: the launch, as step 1 has it.

// region: launch a grid
template <class Kernel> static int launch(Kernel kernel, const Problem& p, void* stream) {
    const CUtensorMap q_map = map_of(p.q, p.q_stride, p.batch, p.heads, p.seq_q, BLOCK_M);
    const CUtensorMap k_map = map_of(p.k, p.k_stride, p.batch, p.kv_heads, p.seq_k, BLOCK_N);
    const CUtensorMap v_map = map_of(p.v, p.v_stride, p.batch, p.kv_heads, p.seq_k, BLOCK_N);
    const unsigned grid = p.batch * p.heads * ceil_div(p.seq_q, BLOCK_M);
    // More than 48 KB of shared memory have to be asked for. A refusal is what cudaGetLastError then returns.
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    kernel<<<grid, THREADS, SHARED, (cudaStream_t)stream>>>(p, q_map, k_map, v_map);
    return (int)cudaGetLastError();
}
// endregion
