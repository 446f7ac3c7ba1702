// launch_parts.cuh - phase 11, steps 11 to 16: the launch, as step 10 has it.

// region: launch of blocks that stay
template <class Kernel> static int launch(Kernel kernel, const Problem& p, void* stream) {
    const CUtensorMap q_map = map_of(p.q, p.q_stride, p.batch, p.heads, p.seq_q, BLOCK_M);
    const CUtensorMap k_map = map_of(p.k, p.k_stride, p.batch, p.kv_heads, p.seq_k, BLOCK_N);
    const CUtensorMap v_map = map_of(p.v, p.v_stride, p.batch, p.kv_heads, p.seq_k, BLOCK_N);
    const CUtensorMap o_map = map_of(p.o, p.o_stride, p.batch, p.heads, p.seq_q, 64);
    const int parts = p.batch * p.heads * ceil_div(p.seq_q, BLOCK_M), grid = min(p.sms, parts);
    const int heads_together = fit_together(p.seq_k, p.batch * p.heads);
    cudaMemsetAsync(p.workspace, 0, sizeof(int), (cudaStream_t)stream);
    // More than 48 KB of shared memory have to be asked for. A refusal is what cudaGetLastError then returns.
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    kernel<<<grid, THREADS, SHARED, (cudaStream_t)stream>>>(p, heads_together, q_map, k_map, v_map, o_map);
    return (int)cudaGetLastError();
}
// endregion
