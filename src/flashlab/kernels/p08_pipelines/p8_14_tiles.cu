// Phase 8, step 14: lower tiles for small grids, and D = 256.
//
// O = softmax(scale * Q K^T) V, fp16 or bf16 in and out, fp32 accumulators and statistics. A block owns BLOCK_M query
// rows and walks their keys backwards in tiles of BLOCK_N; a warp owns 16 or 32 of the rows and all their keys. Where
// blocks of 128 rows would be too few to fill the GPU, they have 64.
//
// Compile with -DHEAD_DIM=64, 128 or 256, and -DELEMENT=__half or __nv_bfloat16.
#include "ptx.cuh"
#include "problem.cuh"
#include <type_traits>

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef ELEMENT
#define ELEMENT __half
#endif
using T = ELEMENT;

// New: D = 256 has 128 accumulators a lane for 16 rows: eight warps of one MMA tile then, and one block an SM
constexpr int D = HEAD_DIM, BLOCK_N = 64, WARPS = D == 256 ? 8 : 4, THREADS = 32 * WARPS, STAGES = 2;
constexpr int BLOCKS_AN_SM = D == 256 ? 1 : 2;                 // registers and shared memory have room for
constexpr int S_TILES = BLOCK_N / 8, O_TILES = D / 8;          // accumulator tiles of 16 x 8
constexpr int KV_TILE = BLOCK_N * D * 2;                       // bytes
// New: M_TILES MMA tiles of 16 rows a warp
template <int M_TILES> constexpr int BLOCK_M = 16 * M_TILES * WARPS;
template <int M_TILES> constexpr int Q_TILE = BLOCK_M<M_TILES> * D * 2;
template <int M_TILES> constexpr int SHARED = Q_TILE<M_TILES> + 2 * STAGES * KV_TILE;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
// How far the row maximum may lag behind, in log2 units: P stays below 2^8, far from fp16's 65504.
constexpr float RESCALE_ABOVE = 8.f;

// Element (row, column) of a tile of shared memory, in bytes from its start; column is a multiple of 8. Rows 8, 16 ...
// further are 16 D, 32 D ... bytes further; columns 16 k on of a row whose first column is below 16 are at (address ^
// 32 k).
__device__ __forceinline__ int at(int row, int column) { return row * D * 2 + (column / 8 ^ row % 8) * 16; }

// A thread copies the 16 bytes at (chunk_row(), chunk_column()), and those ROWS_A_PASS, 2 ROWS_A_PASS ... rows
// below.
constexpr int ROWS_A_PASS = THREADS / (D / 8);
static_assert(ROWS_A_PASS % 8 == 0, "the swizzle of a thread's chunk is the same in every pass");
__device__ __forceinline__ int chunk_row() { return threadIdx.x / (D / 8); }
__device__ __forceinline__ int chunk_column() { return threadIdx.x % (D / 8) * 8; }

// Copies a tile of ROWS rows, which exist; `to` and `from` are this thread's first chunk.
template <int ROWS> __device__ __forceinline__ void copy_tile(uint32_t to, const T* from, int64_t row_stride) {
#pragma unroll
    for (int i = 0; i < ROWS; i += ROWS_A_PASS, from += ROWS_A_PASS * row_stride) cp_async<16>(to + i * D * 2, from);
}
// The same, of which only `rows` rows exist: the rest becomes 0. A copy of no bytes needs a valid address all the same.
template <int ROWS>
__device__ __forceinline__ void copy_part(uint32_t to, const T* from, int64_t row_stride, int rows) {
    const T* valid = from - chunk_row() * row_stride;
#pragma unroll
    for (int i = 0; i < ROWS; i += ROWS_A_PASS, from += ROWS_A_PASS * row_stride) {
        const bool exists = chunk_row() + i < rows;
        cp_async<16>(to + i * D * 2, exists ? from : valid, exists ? 16 : 0);
    }
}

template <int M_TILES, bool CAUSAL>                            // New: M_TILES
__global__ void __launch_bounds__(THREADS, BLOCKS_AN_SM)
flash_forward(const Problem p, int heads_together) {
    constexpr int BLOCK_M = ::BLOCK_M<M_TILES>;
    constexpr bool Q_IN_REGISTERS = M_TILES * D <= 128;
    extern __shared__ __align__(1024) char shared[];
    const uint32_t q_smem = smem_u32(shared);                  // [BLOCK_M, D]
    const uint32_t k_smem = q_smem + Q_TILE<M_TILES>;          // [STAGES, BLOCK_N, D]
    const uint32_t v_smem = k_smem + STAGES * KV_TILE;         // [STAGES, BLOCK_N, D]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;

    // Which rows. Causal blocks go group of heads by group, the last rows of all its heads first
    const int m_blocks = (p.seq_q + BLOCK_M - 1) / BLOCK_M, block = blockIdx.x;
    const int group = block / (m_blocks * heads_together), in_group = block % (m_blocks * heads_together);
    const int group_heads = min(heads_together, p.batch * p.heads - group * heads_together);
    const int head_index = CAUSAL ? group * heads_together + in_group % group_heads : block / m_blocks;
    const int m_block = CAUSAL ? m_blocks - 1 - in_group / group_heads : block % m_blocks;
    const int m_start = m_block * BLOCK_M, warp_row = warp * 16 * M_TILES;
    const int batch = head_index / p.heads, head = head_index % p.heads, kv_head = head / (p.heads / p.kv_heads);
    const T* q_gmem = rows_of((const T*)p.q, p.q_stride, batch, head, m_start);        // [BLOCK_M, D]
    const T* k_gmem = rows_of((const T*)p.k, p.k_stride, batch, kv_head, 0);   // [seq_k, D]
    const T* v_gmem = rows_of((const T*)p.v, p.v_stride, batch, kv_head, 0);   // [seq_k, D]
    T* o_gmem = rows_of((T*)p.o, p.o_stride, batch, head, m_start);    // [BLOCK_M, D]

    // Which keys. Tiles 0 .. last - 1, and from tile `full` on, some row of the block does not see every key.
    const int diagonal = p.seq_k - p.seq_q;                    // causal: row i sees the keys up to i + diagonal
    int last = (p.seq_k + BLOCK_N - 1) / BLOCK_N, full = p.seq_k / BLOCK_N;
    if (CAUSAL) {
        last = max(0, min(last, (m_start + BLOCK_M + diagonal + BLOCK_N - 1) / BLOCK_N));
        full = max(0, min(full, (m_start + 1 + diagonal) / BLOCK_N));
    }

    // c0 c1 | c2 c3: columns 2t, 2t + 1 of row g | of row g + 8
    float acc[M_TILES][O_TILES][4] = {};                       // O, not yet divided by the sum
    float row_max[M_TILES][2];                                 // of row g, of row g + 8: of the raw scores
    float row_sum[M_TILES][2];                                 // of this lane's columns only
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; i++) row_max[i / 2][i % 2] = -INFINITY, row_sum[i / 2][i % 2] = 0.f;
    const float scale_log2 = p.scale * LOG2E;

    // What this lane gives to ldmatrix, of the first 16 rows and columns
    const uint32_t q_lane = q_smem + at(warp_row + lane % 16, lane / 16 * 8);
    const uint32_t k_lane = k_smem + at(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
    const uint32_t v_lane = v_smem + at(lane % 16, lane / 16 * 8);

    // This thread's chunk of the tiles to copy, from and to
    const int64_t key = (int64_t)(last - 1) * BLOCK_N + chunk_row();
    const T* q_from = q_gmem + chunk_row() * p.q_stride.row + chunk_column();
    const T* k_next = k_gmem + key * p.k_stride.row + chunk_column();
    const T* v_next = v_gmem + key * p.v_stride.row + chunk_column();
    const uint32_t chunk = at(chunk_row(), chunk_column()), k_to = k_smem + chunk, v_to = v_smem + chunk;
    copy_part<BLOCK_M>(q_smem + chunk, q_from, p.q_stride.row, p.seq_q - m_start);
    if (last > 0) {
        copy_part<BLOCK_N>(k_to, k_next, p.k_stride.row, p.seq_k - (last - 1) * BLOCK_N);
        copy_part<BLOCK_N>(v_to, v_next, p.v_stride.row, p.seq_k - (last - 1) * BLOCK_N);
    }
    cp_async_commit();

    uint32_t q_rmem[Q_IN_REGISTERS ? D / 16 : 2][M_TILES][4];  // A: 16 M_TILES rows x D, or twice 16, columns of Q
    auto load_q = [&](uint32_t(&a)[M_TILES][4], int k) {
#pragma unroll
        for (int m = 0; m < M_TILES; m++) ldmatrix_x4(a[m], (q_lane ^ (k * 32)) + m * 16 * D * 2);
    };
    cp_async_wait<0>();
    __syncthreads();                                           // every thread's part of Q is here
#pragma unroll
    for (int k = 0; Q_IN_REGISTERS && k < D / 16; k++) load_q(q_rmem[k], k);

    auto tile = [&](int j, auto is_masked) {                   // the body of the loop, compiled twice
        constexpr bool MASKED = decltype(is_masked)::value;
        const uint32_t stage = (last - 1 - j) & 1 ? KV_TILE : 0;
        cp_async_wait<0>();                                    // this thread's part of K_j and V_j is here
        __syncthreads();                                       // every thread's is; nobody reads tile j + 1 any more
        if (j > 0) {                                           // into the stage of tile j + 1, by running pointers
            k_next -= BLOCK_N * p.k_stride.row, v_next -= BLOCK_N * p.v_stride.row;
            copy_tile<BLOCK_N>(k_to + (KV_TILE - stage), k_next, p.k_stride.row);
            copy_tile<BLOCK_N>(v_to + (KV_TILE - stage), v_next, p.v_stride.row);
        }
        cp_async_commit();

        // S = Q K^T. The rows of K are the columns of K^T: ldmatrix without trans gives the B fragment.
        float s[M_TILES][S_TILES][4] = {};
        uint32_t b[2][4];                                      // B twice: 16 columns x 16 keys; and the next ones
        if (!Q_IN_REGISTERS) load_q(q_rmem[0], 0);
        ldmatrix_x4(b[0], k_lane + stage);
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            const auto& a = q_rmem[Q_IN_REGISTERS ? k : k % 2];
            if (!Q_IN_REGISTERS && k + 1 < D / 16) load_q(q_rmem[(k + 1) % 2], k + 1);
#pragma unroll
            for (int n = 0; n < S_TILES / 2; n++) {
                const int next_n = (n + 1) % (S_TILES / 2), next_k = next_n == 0 ? k + 1 : k;
                if (next_k < D / 16)
                    ldmatrix_x4(b[(n + 1) % 2], (k_lane ^ (next_k * 32)) + stage + next_n * 16 * D * 2);
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {            // one fragment of K, M_TILES of Q
                    mma_m16n8k16<T>(s[m][2 * n], a[m], b[n % 2][0], b[n % 2][1]);
                    mma_m16n8k16<T>(s[m][2 * n + 1], a[m], b[n % 2][2], b[n % 2][3]);
                }
            }
        }

        // The row maxima
        float new_max[M_TILES][2];
        bool moved = false;
#pragma unroll
        for (int i = 0; i < 2 * M_TILES; i++) {                // row g + 8 h of tile m
            const int m = i / 2, h = i % 2, row = m_start + warp_row + m * 16 + g + h * 8;
            const int last_key = CAUSAL ? min(p.seq_k - 1, row + diagonal) : p.seq_k - 1;
            float x = row_max[m][h];
#pragma unroll
            for (int n = 0; n < S_TILES; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    if (MASKED && j * BLOCK_N + n * 8 + t * 2 + e > last_key) s[m][n][2 * h + e] = -INFINITY;
                    x = fmaxf(x, s[m][n][2 * h + e]);
                }
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));          // a row lives in the four lanes of a quad
            new_max[m][h] = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
            moved |= (new_max[m][h] - row_max[m][h]) * scale_log2 > RESCALE_ABOVE;     // (NaN is not above)
        }

        // When some row needs it, what was summed under the old maximum is brought under the new one
        if (__any_sync(~0u, moved)) {
#pragma unroll
            for (int i = 0; i < 2 * M_TILES; i++) {
                const int m = i / 2, h = i % 2;
                const float base = new_max[m][h] == -INFINITY ? 0.f : new_max[m][h];   // -inf - (-inf) would be NaN
                const float correction = exp2_approx((row_max[m][h] - base) * scale_log2);
                row_max[m][h] = new_max[m][h];
                row_sum[m][h] *= correction;
#pragma unroll
                for (int n = 0; n < O_TILES; n++) acc[m][n][2 * h] *= correction, acc[m][n][2 * h + 1] *= correction;
            }
        }

        // P = 2^(S - maximum)
#pragma unroll
        for (int i = 0; i < 2 * M_TILES; i++) {
            const int m = i / 2, h = i % 2;
            const float base = (row_max[m][h] == -INFINITY ? 0.f : row_max[m][h]) * scale_log2;
#pragma unroll
            for (int n = 0; n < S_TILES; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    s[m][n][2 * h + e] = exp2_approx(fmaf(s[m][n][2 * h + e], scale_log2, -base));
                    row_sum[m][h] += s[m][n][2 * h + e];
                }
        }

        // O += P V. Two neighbouring accumulator tiles of S, rounded, are the A fragment of P: no lane needs another's
        // numbers. B wants two keys of one column of V in a register, and they lie in two rows: ldmatrix with trans.
#pragma unroll
        for (int k = 0; k < BLOCK_N / 16; k++) {
            uint32_t a[M_TILES][4];
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                const float(&c)[4] = s[m][2 * k], (&d)[4] = s[m][2 * k + 1];
                a[m][0] = pack<T>(c[0], c[1]), a[m][1] = pack<T>(c[2], c[3]);
                a[m][2] = pack<T>(d[0], d[1]), a[m][3] = pack<T>(d[2], d[3]);
            }
#pragma unroll
            for (int n = 0; n < O_TILES / 2; n++) {
                uint32_t b[4];                                 // B twice: 16 keys x 16 columns of V
                ldmatrix_x4_trans(b, (v_lane ^ (n * 32)) + stage + k * 16 * D * 2);
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {
                    mma_m16n8k16<T>(acc[m][2 * n], a[m], b[0], b[1]);
                    mma_m16n8k16<T>(acc[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
    };
    int j = last - 1;
    for (; j >= full; j--) tile(j, std::true_type{});          // the masked tiles
    for (; j >= 0; j--) tile(j, std::false_type{});            // the full ones
    cp_async_wait<0>();
    __syncthreads();                                           // Q has been read, and its tile is free for O

    // O and lse
    const int64_t lse_row = (int64_t)head_index * p.seq_q + m_start;
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; i++) {
        const int m = i / 2, h = i % 2, row = warp_row + m * 16 + g + h * 8;
        float sum = row_sum[m][h];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float inverse = sum > 0.f ? 1.f / sum : sum;     // a row that sees no key: 0; NaN stays NaN
        if (t == 0 && m_start + row < p.seq_q)
            p.lse[lse_row + row] = sum == 0.f ? -INFINITY : (row_max[m][h] * scale_log2 + log2f(sum)) * LN2;
#pragma unroll
        for (int n = 0; n < O_TILES; n++)
            *(uint32_t*)(shared + at(row, n * 8) + t * 4) =
                pack<T>(acc[m][n][2 * h] * inverse, acc[m][n][2 * h + 1] * inverse);
    }
    __syncwarp();                                              // all lanes' parts of the warp's rows are here
#pragma unroll
    for (int i = lane; i < 16 * M_TILES * D / 8; i += 32) {
        const int row = warp_row + i / (D / 8), column = i % (D / 8) * 8;
        if (m_start + row < p.seq_q)
            *(uint4*)(o_gmem + row * p.o_stride.row + column) = *(const uint4*)(shared + at(row, column));
    }
}

// ---- host -----------------------------------------------------------------------------------------------------------
template <int M_TILES> static int64_t blocks(const Problem& p) {
    return (int64_t)p.batch * p.heads * ((p.seq_q + BLOCK_M<M_TILES> - 1) / BLOCK_M<M_TILES>);
}

extern "C" int64_t workspace_floats(const Problem* p) { return 0; }

template <int M_TILES> static int launch(const Problem& p, void* stream) {
    if (blocks<M_TILES>(p) == 0) return 0;
    const auto kernel = p.causal ? flash_forward<M_TILES, true> : flash_forward<M_TILES, false>;
    const int bytes = SHARED<M_TILES>;
    const int error = (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error) return error;
    // K and V of these heads are half of a 50 MB L2
    const int64_t fit = max((int64_t)1, 24000000 / ((int64_t)p.seq_k * D * 4 + 1));
    const int heads_together = (int)min((int64_t)p.batch * p.heads, fit);
    LAUNCH(kernel, (unsigned)blocks<M_TILES>(p), THREADS, bytes, stream, p, heads_together);
    return (int)cudaGetLastError();
}

// 0, or a cudaError
constexpr int TALL = D == 256 ? 1 : 2;                         // MMA tiles a warp
extern "C" int forward(const Problem* p, void* stream) {
    if (2 * blocks<TALL>(*p) < 3 * p->sms) return launch<1>(*p, stream);       // New: less than 1.5 blocks an SM
    return launch<TALL>(*p, stream);
}
