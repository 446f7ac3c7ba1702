// FlashAttention forward for the emulator's own tests: O = softmax(Q K^T * scale) V, fp16 in and out, fp32
// accumulate. A block is 4 warps and owns 64 query rows, 16 a warp; K and V come in tiles of 64 keys through
// two stages of cp.async.
#include "ptx.cuh"

#ifndef SWIZZLE
#define SWIZZLE 1
#endif

constexpr int BLOCK_M = 64, BLOCK_N = 64, THREADS = 128;

// Byte offset of a 16-byte chunk of a tile. The XOR spreads the 8 rows that one ldmatrix reads over all 32
// banks.
template <int HEAD_DIM>
__device__ __forceinline__ uint32_t chunk_at(int row, int chunk) {
    return (uint32_t)(row * HEAD_DIM * 2 + (SWIZZLE ? chunk ^ (row & 7) : chunk) * 16);
}

// 64 rows of [n, HEAD_DIM]; rows from n on become zeros
template <int HEAD_DIM>
__device__ __forceinline__ void load_tile(uint32_t tile_smem, const __half* source_gmem, int first_row,
                                          int n) {
    constexpr int CHUNKS = HEAD_DIM / 8;
    for (int i = threadIdx.x; i < 64 * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const bool inside = first_row + row < n;
        const size_t source_row = inside ? first_row + row : 0;
        cp_async<16>(tile_smem + chunk_at<HEAD_DIM>(row, chunk),
                     source_gmem + source_row * HEAD_DIM + chunk * 8, inside ? 16 : 0);
    }
}

template <int HEAD_DIM>
__global__ void __launch_bounds__(THREADS)
    flash_forward(const __half* __restrict__ q_gmem, const __half* __restrict__ k_gmem,
                  const __half* __restrict__ v_gmem,  // [heads, n, HEAD_DIM]
                  __half* __restrict__ o_gmem, float* __restrict__ lse_gmem, int n, float scale_log2,
                  int causal) {
    extern __shared__ __align__(1024) unsigned char tiles[];
    constexpr int TILE = 64 * HEAD_DIM * 2;  // bytes
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int first_row = blockIdx.x * BLOCK_M;
    const size_t head = (size_t)blockIdx.y * n * HEAD_DIM;
    const uint32_t q_smem = smem_u32(tiles), k_smem = q_smem + TILE, v_smem = k_smem + 2 * TILE;

    int blocks = (n + BLOCK_N - 1) / BLOCK_N;
    if (causal) blocks = min(blocks, (first_row + BLOCK_M + BLOCK_N - 1) / BLOCK_N);
    load_tile<HEAD_DIM>(q_smem, q_gmem + head, first_row, n);
    load_tile<HEAD_DIM>(k_smem, k_gmem + head, 0, n);
    cp_async_commit();
    load_tile<HEAD_DIM>(v_smem, v_gmem + head, 0, n);
    cp_async_commit();

    float acc[HEAD_DIM / 8][4] = {}, m_i[2] = {-INFINITY, -INFINITY}, l_i[2] = {0.f, 0.f};
    uint32_t q[HEAD_DIM / 16][4];
    for (int j = 0; j < blocks; j++) {
        const uint32_t stage = (j & 1) * TILE, next = TILE - stage;
        cp_async_wait<1>();  // K_j has landed (and Q)
        __syncthreads();     // for all threads; and K_{j-1} has been read, so that its stage may be filled
        if (j + 1 < blocks) load_tile<HEAD_DIM>(k_smem + next, k_gmem + head, (j + 1) * BLOCK_N, n);
        cp_async_commit();
        if (j == 0)
            for (int kk = 0; kk < HEAD_DIM / 16; kk++)
                ldmatrix_x4(q[kk], q_smem + chunk_at<HEAD_DIM>(warp * 16 + lane % 16, kk * 2 + lane / 16));

        float s[BLOCK_N / 8][4] = {};
#pragma unroll
        for (int kk = 0; kk < HEAD_DIM / 16; kk++)
#pragma unroll
            for (int nn = 0; nn < BLOCK_N / 16; nn++) {
                uint32_t b[4];
                ldmatrix_x4(b, k_smem + stage +
                                   chunk_at<HEAD_DIM>(nn * 16 + (lane & 7) + (lane >> 4) * 8,
                                                      kk * 2 + (lane >> 3 & 1)));
                mma_m16n8k16(s[2 * nn], q[kk], b[0], b[1]);
                mma_m16n8k16(s[2 * nn + 1], q[kk], b[2], b[3]);
            }

            // Online softmax. A row lies in the 4 lanes of a quad; each lane holds two of its warp's rows.
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = first_row + warp * 16 + g + h * 8;
            float m_new = m_i[h];
#pragma unroll
            for (int i = 0; i < BLOCK_N / 8; i++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int key = j * BLOCK_N + i * 8 + t * 2 + e;
                    float& x = s[i][2 * h + e];
                    x = key >= n || (causal && key > row) ? -INFINITY : x * scale_log2;
                    m_new = fmaxf(m_new, x);
                }
            m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 1));
            m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 2));
            const float shift = m_new == -INFINITY ? 0.f : m_new;
            const float correction = exp2_approx(m_i[h] - shift);
            float sum = 0.f;
#pragma unroll
            for (int i = 0; i < BLOCK_N / 8; i++)
#pragma unroll
                for (int e = 0; e < 2; e++) sum += s[i][2 * h + e] = exp2_approx(s[i][2 * h + e] - shift);
            l_i[h] = l_i[h] * correction + sum;
            m_i[h] = m_new;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; i++)
                acc[i][2 * h] *= correction, acc[i][2 * h + 1] *= correction;
        }

        cp_async_wait<1>();  // V_j has landed
        __syncthreads();     // for all threads; and V_{j-1} has been read
        if (j + 1 < blocks) load_tile<HEAD_DIM>(v_smem + next, v_gmem + head, (j + 1) * BLOCK_N, n);
        cp_async_commit();
#pragma unroll
        for (int kk = 0; kk < BLOCK_N / 16; kk++) {
            // the accumulators of the first product are the A fragments of the second
            const uint32_t p[4] = {pack(s[2 * kk][0], s[2 * kk][1]), pack(s[2 * kk][2], s[2 * kk][3]),
                                   pack(s[2 * kk + 1][0], s[2 * kk + 1][1]),
                                   pack(s[2 * kk + 1][2], s[2 * kk + 1][3])};
#pragma unroll
            for (int nn = 0; nn < HEAD_DIM / 16; nn++) {
                uint32_t b[4];
                ldmatrix_x4_trans(
                    b, v_smem + stage + chunk_at<HEAD_DIM>(kk * 16 + lane % 16, nn * 2 + lane / 16));
                mma_m16n8k16(acc[2 * nn], p, b[0], b[1]);
                mma_m16n8k16(acc[2 * nn + 1], p, b[2], b[3]);
            }
        }
    }
    cp_async_wait<0>();

#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = l_i[h];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const int row = first_row + warp * 16 + g + h * 8;
        if (row >= n) continue;
        const float inverse = sum > 0.f ? 1.f / sum : 0.f;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; i++)
            *(uint32_t*)(o_gmem + head + (size_t)row * HEAD_DIM + i * 8 + t * 2) =
                pack(acc[i][2 * h] * inverse, acc[i][2 * h + 1] * inverse);
        if (t == 0)
            lse_gmem[(size_t)blockIdx.y * n + row] =
                sum > 0.f ? (m_i[h] + log2f(sum)) * 0.6931471805599453f : -INFINITY;
    }
}

extern "C" int flash(const __half* q, const __half* k, const __half* v, __half* o, float* lse, int heads,
                     int n, int head_dim, float scale, int causal, cudaStream_t stream) {
    const int bytes = 5 * 64 * head_dim * 2;
    auto kernel = head_dim == 64 ? flash_forward<64> : head_dim == 128 ? flash_forward<128> : nullptr;
    if (!kernel) return -1;
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    kernel<<<dim3((n + BLOCK_M - 1) / BLOCK_M, heads), THREADS, bytes, stream>>>(
        q, k, v, o, lse, n, scale * 1.4426950408889634f, causal);
    return cudaGetLastError();
}
