// start.cuh - phase 11, steps 11 to the last: the tensor maps and the launch, as step 10 has them.

// region: start
// rest: what the kernel takes between the problem and the maps.
template <class Kernel, class... Rest>
static int start(Kernel kernel, int grid, int threads, int shared, int block_m, const Problem& p, void* stream,
                 Rest... rest) {
    const CUtensorMap q_map = map_of(p.q, p.q_stride, p.batch, p.heads, p.seq_q, block_m);
    const CUtensorMap k_map = map_of(p.k, p.k_stride, p.batch, p.kv_heads, p.seq_k, BLOCK_N);
    const CUtensorMap v_map = map_of(p.v, p.v_stride, p.batch, p.kv_heads, p.seq_k, BLOCK_N);
    const CUtensorMap o_map = map_of(p.o, p.o_stride, p.batch, p.heads, p.seq_q, 64);
    // More than 48 KB of shared memory have to be asked for. A refusal is what cudaGetLastError then returns.
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    kernel<<<grid, threads, shared, (cudaStream_t)stream>>>(p, rest..., q_map, k_map, v_map, o_map);
    return (int)cudaGetLastError();
}
// endregion
