// Phase 9, the last step: several blocks share the keys, when rows are few.
//
// O = softmax(scale * Q K^T) V, fp16 or bf16 in and out, fp32 accumulators and statistics. A block owns BLOCK_M query
// rows and walks their keys backwards in tiles of BLOCK_N; a warp owns 16 or 32 of the rows and all their keys. Where
// even low blocks are too few to fill the GPU, several blocks divide the keys of the same rows (split-KV between
// blocks, flash decoding), and a second kernel merges what they found.
//
// Compile with -DHEAD_DIM=64, 128 or 256, and -DELEMENT=__half or __nv_bfloat16.

// region: constants
#include "problem.cuh"

// HEAD_DIM = 256 has 128 accumulators per lane for 16 rows: eight warps of one MMA tile then, one block per SM
constexpr int WARPS = HEAD_DIM == 256 ? 8 : 4, THREADS = WARPS * WARP_SIZE, STAGES = 2;
constexpr int BLOCKS_PER_SM = HEAD_DIM == 256 ? 1 : 2;         // that registers have room for
constexpr int CHUNKS = HEAD_DIM / 8, ROW_BYTES = HEAD_DIM * 2; // per row of a tile; a chunk is 16 bytes, 8 numbers
constexpr int O_TILES = HEAD_DIM / MMA_N;                      // accumulators of a warp, [MMA_M, MMA_N] each
// How far the row maximum may lag behind, in log2 units: P stays below 2^8, far from fp16's 65504.
constexpr float RESCALE_ABOVE = 8.f;

template <int M_TILES_, int BLOCK_N_ = 64> struct Tile {       // M_TILES MMA tiles of 16 rows per warp
    static constexpr int M_TILES = M_TILES_, BLOCK_M = WARPS * M_TILES * MMA_M;
    // Keys at a time
    static constexpr int BLOCK_N = BLOCK_N_, S_TILES = BLOCK_N / MMA_N, KV_BYTES = BLOCK_N * ROW_BYTES;
    static constexpr int ROWS_PER_LANE = 2 * M_TILES;          // g, g + 8, g + 16 ...: row r % 2 of tile r / 2
    static constexpr bool Q_IN_REGISTERS = M_TILES * HEAD_DIM <= 128;          // there is room for no more
    static constexpr int Q_BYTES = BLOCK_M * ROW_BYTES, SHARED = Q_BYTES + 2 * STAGES * KV_BYTES;
};
#include "p09_past_flash_attention_2/copies.cuh"
#include "p09_past_flash_attention_2/warp_tile.cuh"
// endregion

// region: shared memory
template <class Tile, bool CAUSAL, bool SPLIT>                 // New: SPLIT
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
flash_forward(const Problem p, int heads_together, int splits) {
    constexpr int M_TILES = Tile::M_TILES, BLOCK_M = Tile::BLOCK_M, ROWS_PER_LANE = Tile::ROWS_PER_LANE;
    constexpr int BLOCK_N = Tile::BLOCK_N, S_TILES = Tile::S_TILES, KV_BYTES = Tile::KV_BYTES;
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
    const int split = SPLIT ? blockIdx.x % splits : 0, block = SPLIT ? blockIdx.x / splits : blockIdx.x;       // New
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
    // Tiles begin .. end - 1; from tile `full` on, some row of the block does not see every key.
    const int diagonal = p.seq_k - p.seq_q;                    // causal: row i sees the keys up to i + diagonal
    int begin = 0, end = ceil_div(p.seq_k, BLOCK_N), full = p.seq_k / BLOCK_N;
    if (CAUSAL) {
        end = max(0, min(end, ceil_div(m_start + BLOCK_M + diagonal, BLOCK_N)));
        full = max(0, min(full, (m_start + 1 + diagonal) / BLOCK_N));
    }
    if (SPLIT) {                                               // New: the tiles in equal shares
        const int share = ceil_div(end, splits);
        begin = min(end, split * share), end = min(end, begin + share), full = max(full, begin);
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
    if (begin < end) {
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
        if (j > begin) {                                       // into the stage of tile j + 1, by running pointers
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
    for (; j >= begin; j--) tile(j, std::false_type{});        // the full ones
    // endregion

    // region: store
    // O and lse
    cp_async_wait<0>();
    __syncthreads();                                           // or a warp would write O over Q it still reads
    const int64_t first_row = ((int64_t)split * p.batch * p.heads + head_index) * p.seq_q + m_start;   // of lse
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
            if (!SPLIT) *(uint32_t*)(shared + at(row, n * MMA_N) + t * 4) = pack<T>(x, y);
            if (SPLIT && m_start + row < p.seq_q)              // New: a part of O, in float
                *(float2*)(p.workspace + (first_row + row) * HEAD_DIM + n * MMA_N + t * 2) = make_float2(x, y);
        }
    }
    if (SPLIT) return;                                         // New
    __syncwarp();                                              // or a lane would read what another has not written
#pragma unroll
    for (int i = lane; i < M_TILES * MMA_M * CHUNKS; i += WARP_SIZE) {     // a warp stores the rows that it wrote
        const int row = warp_row + i / CHUNKS, column = i % CHUNKS * 8;
        if (m_start + row < p.seq_q)
            *(uint4*)(o_gmem + row * p.o_stride.row + column) = *(const uint4*)(shared + at(row, column));
    }
}
// endregion

// region: merge
// New: merges the parts of a row, (o, lse) pairs, weighted by exp(lse - max). One warp per row.
//   part_o [splits, batch, heads, seq_q, HEAD_DIM], part_lse [splits, batch, heads, seq_q]
__global__ void __launch_bounds__(THREADS)
merge(const Problem p, int splits, const float* part_o, const float* part_lse) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int64_t rows = (int64_t)p.batch * p.heads * p.seq_q, row = (int64_t)blockIdx.x * WARPS + warp;
    if (row >= rows) return;
    // region: weighted sum
    float m_i = -INFINITY, l_i = 0.f, acc[HEAD_DIM / 32] = {};
    for (int s = 0; s < splits; s++) m_i = fmaxf(m_i, part_lse[s * rows + row]);
    const float base = m_i == -INFINITY ? 0.f : m_i;
    for (int s = 0; s < splits; s++) {
        const float weight = exp2_approx((part_lse[s * rows + row] - base) * LOG2E);
        l_i += weight;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i += 2) {
            const float2 x = *(const float2*)(part_o + (s * rows + row) * HEAD_DIM + i * 32 + lane * 2);
            acc[i] += weight * x.x, acc[i + 1] += weight * x.y;
        }
    }
    const float inverse = l_i > 0.f ? 1.f / l_i : l_i;
    // endregion
    const int head_index = (int)(row / p.seq_q);
    T* o_gmem = rows_of(p.o, p.o_stride, head_index / p.heads, head_index % p.heads, (int)(row % p.seq_q));
    for (int i = 0; i < HEAD_DIM / 32; i += 2)
        *(uint32_t*)(o_gmem + i * 32 + lane * 2) = pack<T>(acc[i] * inverse, acc[i + 1] * inverse);
    if (lane == 0) p.lse[row] = l_i == 0.f ? -INFINITY : base + log2f(l_i) * LN2;
}
// endregion

// region: launch
// region: launch a tile
template <class Tile> static int blocks(const Problem& p) {
    return p.batch * p.heads * ceil_div(p.seq_q, Tile::BLOCK_M);
}

// Bytes of shared memory in an SM of this device.
static int shared_per_sm() {
    int device = 0, bytes = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    return bytes;
}

template <class Tile, bool SPLIT> static int launch(const Problem& p, int splits, void* stream) {
    // The system adds 1 KB to each block. What fits in the 100 KB of a GeForce needs no smaller tile.
    constexpr int NEEDED = BLOCKS_PER_SM * (Tile::SHARED + 1024);
    if constexpr (NEEDED > 100 * 1024)
        if (NEEDED > shared_per_sm()) return launch<::Tile<Tile::M_TILES, Tile::BLOCK_N / 2>, SPLIT>(p, splits, stream);
    // As many heads as have K and V in half of a 50 MB L2
    const int64_t fit = max((int64_t)1, 24000000 / ((int64_t)p.seq_k * HEAD_DIM * 4 + 1));
    const int heads_together = (int)min((int64_t)p.batch * p.heads, fit);
    // More than 48 KB of shared memory have to be asked for. A refusal is what cudaGetLastError then returns.
    const auto kernel = p.causal ? flash_forward<Tile, true, SPLIT> : flash_forward<Tile, false, SPLIT>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::SHARED);
    kernel<<<blocks<Tile>(p) * splits, THREADS, Tile::SHARED, (cudaStream_t)stream>>>(p, heads_together, splits);
    return (int)cudaGetLastError();
}
// endregion

using Low = Tile<1>;
using Tall = Tile<HEAD_DIM == 256 ? 1 : 2>;

// region: divide the keys
// New: with less than 0.9 low blocks per SM; each share has at least four tiles of 64.
static int splits_of(const Problem& p) {
    const int low = max(1, blocks<Low>(p)), most = min(BLOCKS_PER_SM * p.sms / low, ceil_div(p.seq_k, 64) / 4);
    return 10 * low >= 9 * p.sms ? 1 : max(1, most);
}
extern "C" int64_t workspace_floats(const Problem* p) {        // for the parts: O and lse
    const int64_t splits = splits_of(*p), rows = (int64_t)p->batch * p->heads * p->seq_q;
    return splits == 1 ? 0 : splits * rows * (HEAD_DIM + 1);
}
// endregion

extern "C" int forward(const Problem* p, void* stream) {
    const int splits = splits_of(*p);
    const bool few = 2 * blocks<Tall>(*p) < 3 * p->sms;        // less than 1.5 blocks per SM
    if (splits == 1) return few ? launch<Low, false>(*p, 1, stream) : launch<Tall, false>(*p, 1, stream);
    const int64_t rows = (int64_t)p->batch * p->heads * p->seq_q;
    Problem parts = *p;                                        // New: the parts' lse follow the parts of O
    parts.lse = p->workspace + splits * rows * HEAD_DIM;
    if (int error = launch<Low, true>(parts, splits, stream)) return error;
    merge<<<ceil_div(rows, WARPS), THREADS, 0, (cudaStream_t)stream>>>(*p, splits, p->workspace, parts.lse);
    return (int)cudaGetLastError();
}
// endregion
