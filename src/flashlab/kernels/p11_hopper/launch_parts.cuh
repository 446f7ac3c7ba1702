// launch_parts.cuh - phase 11, steps 11 to 16: the launch, as step 10 has it.
#include "p11_hopper/start.cuh"

// region: launch of blocks that stay
template <class Kernel> static int launch(Kernel kernel, const Problem& p, void* stream) {
    const int parts = p.batch * p.heads * ceil_div(p.seq_q, BLOCK_M), grid = min(p.sms, parts);
    const int heads_together = fit_together(p.seq_k, p.batch * p.heads);
    cudaMemsetAsync(p.workspace, 0, sizeof(int), (cudaStream_t)stream);
    return start(kernel, grid, THREADS, SHARED, BLOCK_M, p, stream, heads_together);
}
// endregion
