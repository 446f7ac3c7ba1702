// Phase 9, step 7: lower tiles for small grids, and HEAD_DIM = 256.
//
// O = softmax(scale * Q K^T) V, fp16 or bf16 in and out, fp32 accumulators and statistics. A block owns BLOCK_M query
// rows and walks their keys backwards in tiles of BLOCK_N; a warp owns 16 or 32 of the rows and all their keys. Where
// blocks of 128 rows would be too few to fill the GPU, they have 64.
//
// Compile with -DHEAD_DIM=64, 128 or 256, and -DELEMENT=__half or __nv_bfloat16.

// region: constants
#include "problem.cuh"

// New: HEAD_DIM = 256 has 128 accumulators per lane for 16 rows: eight warps of one MMA tile then, one block per SM
constexpr int WARPS = HEAD_DIM == 256 ? 8 : 4, THREADS = WARPS * WARP_SIZE, STAGES = 2, BLOCK_N = 64;
constexpr int BLOCKS_PER_SM = HEAD_DIM == 256 ? 1 : 2;         // that registers have room for
constexpr int CHUNKS = HEAD_DIM / 8, ROW_BYTES = HEAD_DIM * 2; // per row of a tile; a chunk is 16 bytes, 8 numbers
constexpr int S_TILES = BLOCK_N / MMA_N, O_TILES = HEAD_DIM / MMA_N;   // accumulators of a warp, [MMA_M, MMA_N] each
constexpr int KV_BYTES = BLOCK_N * ROW_BYTES;                  // per tile of shared memory
// How far the row maximum may lag behind, in log2 units: P stays below 2^8, far from fp16's 65504.
constexpr float RESCALE_ABOVE = 8.f;

template <int M_TILES_> struct Tile {                          // New: M_TILES MMA tiles of 16 rows per warp
    static constexpr int M_TILES = M_TILES_, BLOCK_M = WARPS * M_TILES * MMA_M;
    static constexpr int ROWS_PER_LANE = 2 * M_TILES;          // g, g + 8, g + 16 ...: row r % 2 of tile r / 2
    static constexpr bool Q_IN_REGISTERS = M_TILES * HEAD_DIM <= 128;          // there is room for no more
    static constexpr int Q_BYTES = BLOCK_M * ROW_BYTES, SHARED = Q_BYTES + 2 * STAGES * KV_BYTES;
};
#include "p09_past_flash_attention_2/copies.cuh"
#include "p09_past_flash_attention_2/warp_tile.cuh"
// endregion

// region: shared memory
template <class Tile, bool CAUSAL>                             // New
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
flash_forward(const Problem p, int heads_together) {
    constexpr int M_TILES = Tile::M_TILES, BLOCK_M = Tile::BLOCK_M, ROWS_PER_LANE = Tile::ROWS_PER_LANE;
    constexpr bool Q_IN_REGISTERS = Tile::Q_IN_REGISTERS;
    extern __shared__ __align__(1024) char shared[];
    const uint32_t q_smem = smem_u32(shared);                  // [BLOCK_M, HEAD_DIM]
    const uint32_t k_smem = q_smem + Tile::Q_BYTES;            // [STAGES, BLOCK_N, HEAD_DIM]
    const uint32_t v_smem = k_smem + STAGES * KV_BYTES;        // [STAGES, BLOCK_N, HEAD_DIM]
    // endregion

    // region: which rows
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    // Causal blocks go group of heads by group, the last rows of all its heads first
    const int m_blocks = ceil_div(p.seq_q, BLOCK_M);
    const int block = blockIdx.x;
    const int group = block / (m_blocks * heads_together), in_group = block % (m_blocks * heads_together);
    const int group_heads = min(heads_together, p.batch * p.heads - group * heads_together);
    const int head_index = CAUSAL ? group * heads_together + in_group % group_heads : block / m_blocks;
    const int m_block = CAUSAL ? m_blocks - 1 - in_group / group_heads : block % m_blocks;
    const int m_start = m_block * BLOCK_M;
    const int warp_row = warp * M_TILES * MMA_M;               // the warp's first, in the tile
    const int batch = head_index / p.heads, head = head_index % p.heads, kv_head = head / (p.heads / p.kv_heads);
    const T* q_gmem = rows_of(p.q, p.q_stride, batch, head, m_start);  // [BLOCK_M, HEAD_DIM]
    const T* k_gmem = rows_of(p.k, p.k_stride, batch, kv_head, 0);     // [seq_k, HEAD_DIM]
    const T* v_gmem = rows_of(p.v, p.v_stride, batch, kv_head, 0);     // [seq_k, HEAD_DIM]
    T* o_gmem = rows_of(p.o, p.o_stride, batch, head, m_start);        // [BLOCK_M, HEAD_DIM]
    // endregion

    // region: which keys
    // Tiles 0 .. end - 1; from tile `full` on, some row of the block does not see every key.
    const int diagonal = p.seq_k - p.seq_q;                    // causal: row i sees the keys up to i + diagonal
    int end = ceil_div(p.seq_k, BLOCK_N), full = p.seq_k / BLOCK_N;
    if (CAUSAL) {
        end = max(0, min(end, ceil_div(m_start + BLOCK_M + diagonal, BLOCK_N)));
        full = max(0, min(full, (m_start + 1 + diagonal) / BLOCK_N));
    }
    // endregion

    // region: state
    // c0 c1 | c2 c3 of an accumulator: columns 2t, 2t + 1 of row g | of row g + 8
    float acc[M_TILES][O_TILES][4] = {};                       // O, not yet divided by l_i
    float m_i[ROWS_PER_LANE];                                  // the rows' maxima, of the raw scores
    float l_i[ROWS_PER_LANE] = {};                             // their sums, over this lane's columns
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; r++) m_i[r] = -INFINITY;
    const float scale_log2 = p.scale * LOG2E;                  // exp(x) is computed as exp2(x * log2(e))
    // endregion

    // region: addresses
    // What this lane gives to ldmatrix, of the first 16 rows and columns
    const uint32_t q_lane = q_smem + at(warp_row + lane % 16, lane / 16 * 8);
    const uint32_t k_lane = k_smem + at(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
    const uint32_t v_lane = v_smem + at(lane % 16, lane / 16 * 8);

    // This thread's chunk of the tiles to copy, from and to
    const int64_t key = (int64_t)(end - 1) * BLOCK_N + chunk_row();
    const T* q_from = q_gmem + chunk_row() * p.q_stride.row + chunk_column();
    const T* k_next = k_gmem + key * p.k_stride.row + chunk_column();
    const T* v_next = v_gmem + key * p.v_stride.row + chunk_column();
    const uint32_t chunk = at(chunk_row(), chunk_column()), k_to = k_smem + chunk, v_to = v_smem + chunk;
    // endregion

    // region: first copies
    copy_part<BLOCK_M>(q_smem + chunk, q_from, p.q_stride.row, p.seq_q - m_start);
    if (end > 0) {
        copy_part<BLOCK_N>(k_to, k_next, p.k_stride.row, p.seq_k - (end - 1) * BLOCK_N);
        copy_part<BLOCK_N>(v_to, v_next, p.v_stride.row, p.seq_k - (end - 1) * BLOCK_N);
    }
    cp_async_commit();
    // endregion

    // region: Q in registers
    // A: 16 M_TILES rows x HEAD_DIM, or twice 16, columns of Q
    uint32_t q_rmem[Q_IN_REGISTERS ? HEAD_DIM / MMA_K : 2][M_TILES][4];
    auto load_q = [&](uint32_t(&a)[M_TILES][4], int k) {
#pragma unroll
        for (int m = 0; m < M_TILES; m++) ldmatrix_x4(a[m], (q_lane ^ (k * 32)) + m * MMA_M * ROW_BYTES);
    };
    cp_async_wait<0>();                                        // this thread's part of Q is here
    __syncthreads();                                           // or others' parts would be missing
#pragma unroll
    for (int k = 0; Q_IN_REGISTERS && k < HEAD_DIM / MMA_K; k++) load_q(q_rmem[k], k);
    // endregion

    // region: main loop
    auto last_key = [&](int r) {                               // that this lane's row r sees
        return CAUSAL ? min(p.seq_k - 1, m_start + warp_row + g + r * 8 + diagonal) : p.seq_k - 1;
    };
    auto tile = [&](int j, auto is_masked) {                   // the body of the loop, compiled twice
        constexpr bool MASKED = decltype(is_masked)::value;
        // region: load K and V
        const uint32_t stage = (end - 1 - j) & 1 ? KV_BYTES : 0;
        cp_async_wait<0>();                                    // this thread's part of K_j and V_j is here
        __syncthreads();                                       // or others' parts would be missing, tile j + 1 in use
        if (j > 0) {                                           // into the stage of tile j + 1, by running pointers
            k_next -= BLOCK_N * p.k_stride.row, v_next -= BLOCK_N * p.v_stride.row;
            copy_tile<BLOCK_N>(k_to + (KV_BYTES - stage), k_next, p.k_stride.row);
            copy_tile<BLOCK_N>(v_to + (KV_BYTES - stage), v_next, p.v_stride.row);
        }
        cp_async_commit();
        // endregion

        // region: one tile
        float s[M_TILES][S_TILES][4] = {}, m_new[ROWS_PER_LANE];
        scores(s, q_rmem, load_q, k_lane, stage);
        const bool moved = row_maxima<MASKED>(m_new, m_i, s, j * BLOCK_N + t * 2, last_key, scale_log2);
        if (__any_sync(~0u, moved)) rescale(acc, l_i, m_i, m_new, scale_log2);         // when some row needs it
        probabilities(s, l_i, m_i, scale_log2);
        add_output(acc, s, v_lane, stage);
        // endregion
    };
    int j = end - 1;
    for (; j >= full; j--) tile(j, std::true_type{});          // the masked tiles
    for (; j >= 0; j--) tile(j, std::false_type{});            // the full ones
    // endregion

    // region: store
    // O and lse
    cp_async_wait<0>();
    __syncthreads();                                           // or a warp would write O over Q it still reads
    const int64_t first_row = (int64_t)head_index * p.seq_q + m_start;         // of lse [batch, heads, seq_q]
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; r++) {
        const int row = warp_row + g + r * 8;
        float sum = l_i[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float inverse = sum > 0.f ? 1.f / sum : sum;     // a row that sees no key: 0; NaN stays NaN
        if (t == 0 && m_start + row < p.seq_q)
            p.lse[first_row + row] = sum == 0.f ? -INFINITY : (m_i[r] * scale_log2 + log2f(sum)) * LN2;
#pragma unroll
        for (int n = 0; n < O_TILES; n++) {                    // into the tile of Q, by the swizzle
            const float x = acc[r / 2][n][r % 2 * 2] * inverse, y = acc[r / 2][n][r % 2 * 2 + 1] * inverse;
            *(uint32_t*)(shared + at(row, n * MMA_N) + t * 4) = pack<T>(x, y);
        }
    }
    __syncwarp();                                              // or a lane would read what another has not written
#pragma unroll
    for (int i = lane; i < M_TILES * MMA_M * CHUNKS; i += WARP_SIZE) {     // a warp stores the rows that it wrote
        const int row = warp_row + i / CHUNKS, column = i % CHUNKS * 8;
        if (m_start + row < p.seq_q)
            *(uint4*)(o_gmem + row * p.o_stride.row + column) = *(const uint4*)(shared + at(row, column));
    }
}
// endregion

// region: launch
// region: launch a tile
template <class Tile> static int blocks(const Problem& p) {
    return p.batch * p.heads * ceil_div(p.seq_q, Tile::BLOCK_M);
}

template <class Tile> static int launch(const Problem& p, void* stream) {
    // As many heads as have K and V in half of a 50 MB L2
    const int64_t fit = max((int64_t)1, 24000000 / ((int64_t)p.seq_k * HEAD_DIM * 4 + 1));
    const int heads_together = (int)min((int64_t)p.batch * p.heads, fit);
    // More than 48 KB of shared memory have to be asked for. A refusal is what cudaGetLastError then returns.
    const auto kernel = p.causal ? flash_forward<Tile, true> : flash_forward<Tile, false>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::SHARED);
    kernel<<<blocks<Tile>(p), THREADS, Tile::SHARED, (cudaStream_t)stream>>>(p, heads_together);
    return (int)cudaGetLastError();
}
// endregion

using Low = Tile<1>;
using Tall = Tile<HEAD_DIM == 256 ? 1 : 2>;
extern "C" int forward(const Problem* p, void* stream) {
    const bool few = 2 * blocks<Tall>(*p) < 3 * p->sms;        // New: less than 1.5 blocks per SM
    return few ? launch<Low>(*p, stream) : launch<Tall>(*p, stream);
}
// endregion
