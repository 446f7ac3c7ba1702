// Kernels with one mistake each, as learners make them. Above each: what a watched build has to find, then a fast one
// ("-": nothing, since it sees only what goes through the runtime). `// <-` marks lines that the finding may name.
// Every entry is called with in[4096] = 1, 2, 3 ..., out[4096] = 0 and n = 64 (test_mistakes.py).
#include "ptx.cuh"
#include <assert.h>
#include <stdlib.h>

#define KERNEL(name) __global__ void name(const float* in, float* out, int n)
#define RUN(name, ...)                                             \
    extern "C" int run_##name(const float* in, float* out, int n) { \
        name<<<__VA_ARGS__>>>(in, out, n);                         \
        return cudaGetLastError();                                 \
    }
#define T threadIdx.x

// ==== shared memory: no barrier ==================================================================
// expect: race | -
KERNEL(reduce_without_barrier) {
    __shared__ float s[128];
    s[T] = in[T];
    __syncthreads();
    for (int d = 64; d; d /= 2)
        if (T < d) s[T] += s[T + d];  // <-
    if (T == 0) out[0] = s[0];
}
RUN(reduce_without_barrier, 1, 128)

// expect: race | -
KERNEL(reduce_last_warp_unrolled) {
    __shared__ float s[64];
    s[T] = in[T];
    __syncthreads();
    if (T < 32) s[T] += s[T + 32];  // <-
    if (T < 16) s[T] += s[T + 16];  // <-
    if (T < 8) s[T] += s[T + 8];    // <-
    if (T == 0) out[0] = s[0];      // <-
}
RUN(reduce_last_warp_unrolled, 1, 64)

// expect: race | -
KERNEL(transpose) {
    __shared__ float tile[16][17];
    tile[threadIdx.y][T] = in[threadIdx.y * 16 + T];  // <-
    out[threadIdx.y * 16 + T] = tile[T][threadIdx.y];  // <-
}
RUN(transpose, 1, dim3(16, 16))

// expect: race lanes-disagree | -
KERNEL(histogram_without_atomics) {
    __shared__ int bins[16];
    if (T < 16) bins[T] = 0;
    __syncthreads();
    bins[(int)in[T] % 16]++;  // <-
    __syncthreads();
    if (T < 16) out[T] = bins[T];
}
RUN(histogram_without_atomics, 1, 128)

// expect: race | -
KERNEL(matmul_second_barrier) {
    __shared__ float a[8][8], b[8][8];
    float sum = 0;
    for (int k = 0; k < 16; k += 8) {
        a[threadIdx.y][T] = in[threadIdx.y * 16 + k + T];          // <-
        b[threadIdx.y][T] = in[512 + (k + threadIdx.y) * 16 + T];  // <-
        __syncthreads();
        for (int i = 0; i < 8; i++) sum += a[threadIdx.y][i] * b[i][T];  // <-
    }
    out[threadIdx.y * 8 + T] = sum;
}
RUN(matmul_second_barrier, 1, dim3(8, 8))

// expect: race | -
KERNEL(softmax_reuses_the_buffer) {
    __shared__ float partial[4];
    float m = in[T];
    for (int d = 16; d; d /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
    if (T % 32 == 0) partial[T / 32] = m;
    __syncthreads();
    m = fmaxf(fmaxf(partial[0], partial[1]), fmaxf(partial[2], partial[3]));  // <-
    float sum = __expf(in[T] - m);
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (T % 32 == 0) partial[T / 32] = sum;  // <-
    __syncthreads();
    out[T] = __expf(in[T] - m) / (partial[0] + partial[1] + partial[2] + partial[3]);
}
RUN(softmax_reuses_the_buffer, 1, 128)

// expect: race | -
KERNEL(double_buffer_wrong_index) {
    __shared__ float buffer[2][64];
    buffer[0][T] = in[T];
    __syncthreads();
    for (int i = 1; i < 4; i++) {
        buffer[(i - 1) & 1][T] = in[i * 64 + T];  // <-
        out[T] += buffer[(i - 1) & 1][63 - T];    // <-
        __syncthreads();
    }
}
RUN(double_buffer_wrong_index, 1, 64)

// expect: race | -
KERNEL(a_named_barrier_for_half) {
    __shared__ float s[128];
    s[T] = in[T];                 // <-
    named_barrier_sync(1 + T / 64, 64);
    out[T] = s[127 - T];          // <-
}
RUN(a_named_barrier_for_half, 1, 128)

// expect: race | -
KERNEL(syncwarp_for_the_block) {
    __shared__ float s[128];
    s[T] = in[T];          // <-
    __syncwarp();
    out[T] = s[127 - T];   // <-
}
RUN(syncwarp_for_the_block, 1, 128)

// expect: race | -
KERNEL(reset_beside_the_atomics) {
    __shared__ int count;
    if (T == 0) count = 0;  // <-
    atomicAdd(&count, 1);   // <-
    __syncthreads();
    if (T == 0) out[0] = count;
}
RUN(reset_beside_the_atomics, 1, 64)

// expect: race | -
KERNEL(arrays_that_overlap) {
    extern __shared__ float memory[];
    float *a = memory, *b = memory + 32;  // meant: + 64
    a[T] = in[T];       // <-
    b[T] = in[64 + T];  // <-
    __syncthreads();
    out[T] = a[T] + b[T];
}
RUN(arrays_that_overlap, 1, 64, 512)

// expect: race | -
KERNEL(two_warps_one_word) {
    __shared__ int last;
    last = T / 32;  // <-
    __syncthreads();
    out[T] = last;
}
RUN(two_warps_one_word, 1, 64)

// expect: race | -
KERNEL(a_byte_of_a_word) {
    __shared__ unsigned words[32];
    if (T < 32) words[T] = 0;  // <-
    ((unsigned char*)words)[T] = 1;  // <-
    __syncthreads();
    if (T < 32) out[T] = words[T];
}
RUN(a_byte_of_a_word, 1, 128)

// expect: race | -
KERNEL(ldmatrix_without_barrier) {
    __shared__ __align__(16) __half tile[64 * 8];
    for (int i = 0; i < 8; i++) tile[T * 8 + i] = __float2half(in[T * 8 + i]);  // <-
    uint32_t r[4];
    ldmatrix_x4(r, smem_u32(tile + (T ^ 32) * 8));  // <-
    out[T] = r[0] + r[1] + r[2] + r[3];
}
RUN(ldmatrix_without_barrier, 1, 64)

// expect: race | -
KERNEL(stmatrix_without_barrier) {
    __shared__ __align__(16) __half tile[64 * 8];
    const uint32_t r[4] = {pack(in[T], 1), pack(2, 3), pack(4, 5), pack(6, 7)};
    stmatrix_x4(smem_u32(tile + T * 8), r);  // <-
    out[T] = __half2float(tile[511 - T]);    // <-
}
RUN(stmatrix_without_barrier, 1, 64)

// expect: lanes-disagree race | -
KERNEL(lanes_of_a_warp_disagree) {
    __shared__ float s[4];
    s[T % 4] = in[T];  // <-
    __syncwarp();
    out[T] = s[T % 4];
}
RUN(lanes_of_a_warp_disagree, 1, 32)

// ==== copies =====================================================================================
// expect: read-before-wait | -
KERNEL(a_wait_too_weak) {
    __shared__ __align__(16) float s[3][128];
    for (int i = 0; i < 3; i++) {
        cp_async<16>(smem_u32(&s[i][T * 4]), in + i * 128 + T * 4);  // <-
        cp_async_commit();
    }
    for (int i = 0; i < 3; i++) {
        cp_async_wait<2>();  // right for the first only
        __syncthreads();
        out[i * 32 + T] = s[i][T];  // <-
    }
    cp_async_wait<0>();
}
RUN(a_wait_too_weak, 1, 32)

// expect: read-before-wait | -
KERNEL(a_wait_without_barrier) {
    __shared__ __align__(16) float s[256];
    cp_async<16>(smem_u32(s + T * 4), in + T * 4);  // <-
    cp_async_commit();
    cp_async_wait<0>();
    out[T] = s[255 - T];  // <-
}
RUN(a_wait_without_barrier, 1, 64)

// expect: stage-overwritten | -
KERNEL(a_prefetch_into_the_tile_in_use) {
    __shared__ __align__(16) float s[256];
    cp_async<16>(smem_u32(s + T * 4), in + T * 4);
    cp_async_commit();
    for (int i = 1; i < 3; i++) {
        cp_async_wait<0>();
        __syncthreads();
        out[i * 64 + T] = s[255 - T];  // <-
        cp_async<16>(smem_u32(s + T * 4), in + i * 256 + T * 4);  // <-
        cp_async_commit();
    }
    cp_async_wait<0>();
}
RUN(a_prefetch_into_the_tile_in_use, 1, 64)

// expect: read-before-wait never-waited | never-waited
KERNEL(a_copy_without_commit) {
    __shared__ __align__(16) float s[128];
    cp_async<16>(smem_u32(s + T * 4), in + T * 4);  // <-
    cp_async_wait<0>();
    __syncthreads();
    out[T] = s[T * 4];  // <-
}
RUN(a_copy_without_commit, 1, 32)

// expect: read-before-wait | -
KERNEL(the_last_wait_of_a_pipeline) {
    __shared__ __align__(16) float s[2][128];
    cp_async<16>(smem_u32(&s[0][T * 4]), in + T * 4);
    cp_async_commit();
    for (int i = 0; i < 4; i++) {
        if (i < 3) {
            cp_async<16>(smem_u32(&s[(i + 1) & 1][T * 4]), in + (i + 1) * 128 + T * 4);  // <-
            cp_async_commit();
        }
        cp_async_wait<1>();  // the last tile is in the newest group
        __syncthreads();
        out[i * 32 + T] = s[i & 1][T * 4 % 128];  // <-
        __syncthreads();
    }
    cp_async_wait<0>();
}
RUN(the_last_wait_of_a_pipeline, 1, 32)

// expect: copy-size | copy-size
KERNEL(more_source_bytes_than_a_copy) {
    __shared__ __align__(16) float s[128];
    cp_async<16>(smem_u32(s + T * 4), in + T * 4, n);  // <-
    cp_async_wait_all();
    out[T] = s[T * 4];
}
RUN(more_source_bytes_than_a_copy, 1, 32)

// expect: misaligned | misaligned
KERNEL(a_copy_to_an_odd_row) {
    __shared__ __align__(16) float s[32][5];  // rows of 20 bytes
    cp_async<16>(smem_u32(&s[T][0]), in + T * 4);  // <-
    cp_async_wait_all();
    out[T] = s[T][0];
}
RUN(a_copy_to_an_odd_row, 1, 32)

// expect: global-out-of-bounds | global-out-of-bounds
KERNEL(a_tail_tile_that_is_not_masked) {
    __shared__ __align__(16) float s[128];
    for (int tile = 0; tile < 33; tile++) {  // 4096 are 32 tiles
        cp_async<16>(smem_u32(s + T * 4), in + tile * 128 + T * 4);  // <-
        cp_async_wait_all();
        out[T] += s[T * 4];
    }
}
RUN(a_tail_tile_that_is_not_masked, 1, 32)

// expect: shared-out-of-bounds | shared-out-of-bounds
KERNEL(a_copy_beyond_its_stage) {
    extern __shared__ __align__(16) float dynamic[];
    cp_async<16>(smem_u32(dynamic + 128 * (n / 32) + T * 4), in + T * 4);  // <-
    cp_async_wait_all();
    out[T] = dynamic[T];
}
RUN(a_copy_beyond_its_stage, 1, 32, 1024)

// expect: stage-overwritten race | -
KERNEL(a_store_into_a_copy) {
    __shared__ __align__(16) float s[128];
    cp_async<16>(smem_u32(s + T * 4), in + T * 4);  // <-
    cp_async_commit();
    s[T * 4] = 0;  // <-
    cp_async_wait<0>();
    __syncwarp();
    out[T] = s[T];
}
RUN(a_store_into_a_copy, 1, 32)

// expect: read-before-wait | -
KERNEL(ldmatrix_before_the_wait) {
    __shared__ __align__(16) __half s[32 * 8];
    cp_async<16>(smem_u32(s + T * 8), in + T * 4);  // <-
    cp_async_commit();
    uint32_t r[4];
    ldmatrix_x4(r, smem_u32(s + T * 8));  // <-
    cp_async_wait<0>();
    out[T] = r[0];
}
RUN(ldmatrix_before_the_wait, 1, 32)

// ==== never set ==================================================================================
// expect: uninitialised-shared | -
KERNEL(a_halo_that_nobody_fills) {
    __shared__ float s[66];
    s[T + 1] = in[T];
    __syncthreads();
    out[T] = s[T] + s[T + 2];  // <-
}
RUN(a_halo_that_nobody_fills, 1, 64)

// expect: uninitialised-shared | -
KERNEL(a_sum_that_starts_nowhere) {
    __shared__ float s[64];
    s[T] += in[T];  // <-
    __syncthreads();
    out[T] = s[T];
}
RUN(a_sum_that_starts_nowhere, 1, 64)

// expect: uninitialised-shared | -
KERNEL(an_atomic_that_starts_nowhere) {
    __shared__ int bins[8];
    atomicAdd(&bins[T % 8], 1);  // <-
    __syncthreads();
    if (T < 8) out[T] = bins[T];
}
RUN(an_atomic_that_starts_nowhere, 1, 64)

// expect: uninitialised-local | uninitialised-local -
KERNEL(an_accumulator) {
    float sum;
    for (int i = 0; i < n; i++) sum += in[i * 64 + T];
    out[T] = sum;  // <-
}
RUN(an_accumulator, 1, 64)

// expect: uninitialised-local | uninitialised-local
KERNEL(accumulators_of_an_mma) {
    float c[4];
    const uint32_t a[4] = {pack(1, 1), pack(1, 1), pack(1, 1), pack(1, 1)};
    mma_m16n8k16(c, a, pack(1, 1), pack(1, 1));  // <-
    out[T] = c[0];
}
RUN(accumulators_of_an_mma, 1, 32)

// expect: uninitialised-local | -
KERNEL(a_branch_that_does_not_set) {
    float v;
    if (T < 32) v = in[T];
    out[T] = v;  // <-
}
RUN(a_branch_that_does_not_set, 1, 64)

struct State {
    float m, l, o[2];
};
// expect: uninitialised-local | -
KERNEL(a_field_of_a_state) {
    State state;
    state.m = in[T], state.o[0] = state.o[1] = 0;
    for (int i = 0; i < 4; i++) state.o[i % 2] += in[i];
    out[T] = state.m;
    out[64 + T] = state.l;  // <-
}
RUN(a_field_of_a_state, 1, 64)

// expect: uninitialised-local | uninitialised-local
KERNEL(a_shuffle_of_nothing) {
    float v;
    if (n < 0) v = in[T];
    out[T] = __shfl_xor_sync(~0u, v, 1);  // <-
}
RUN(a_shuffle_of_nothing, 1, 32)

// expect: uninitialised-local | -
KERNEL(an_array_filled_halfway) {
    float row[8];
    for (int i = 0; i < 4; i++) row[i] = in[i * 64 + T];
    for (int i = 0; i < 8; i++) out[i * 64 + T] = row[(i + n) % 8];  // <-
}
RUN(an_array_filled_halfway, 1, 64)

// expect: uninitialised-shared | -
KERNEL(ldmatrix_of_rows_nobody_filled) {
    __shared__ __align__(16) __half tile[32 * 8];
    if (T < 24)
        for (int i = 0; i < 8; i++) tile[T * 8 + i] = __float2half(in[i]);
    __syncwarp();
    uint32_t r[4];
    ldmatrix_x4(r, smem_u32(tile + T * 8));  // <-
    out[T] = r[0];
}
RUN(ldmatrix_of_rows_nobody_filled, 1, 32)

// expect: uninitialised-shared | -
KERNEL(a_buffer_of_the_block_before) {  // shared memory does not outlive its block
    __shared__ float s[64];
    if (blockIdx.x == 0) s[T] = in[T];
    __syncthreads();
    out[blockIdx.x * 64 + T] = s[T];  // <-
}
RUN(a_buffer_of_the_block_before, 2, 64)

// ==== bounds =====================================================================================
// expect: global-out-of-bounds | global-out-of-bounds
KERNEL(no_guard) { out[blockIdx.x * blockDim.x + T] = 1; }  // <-
RUN(no_guard, 17, 256)

// expect: global-out-of-bounds | global-out-of-bounds
KERNEL(a_guard_with_an_equals_sign) {
    const int i = blockIdx.x * blockDim.x + T;
    if (i <= 4096) out[i] = 1;  // <-
}
RUN(a_guard_with_an_equals_sign, 17, 256)

// expect: global-out-of-bounds | global-out-of-bounds
KERNEL(the_element_before_the_first) { out[T] = in[(int)T - 1]; }  // <-
RUN(the_element_before_the_first, 1, 64)

// expect: global-out-of-bounds | global-out-of-bounds
KERNEL(rows_and_columns_swapped) {
    for (int j = 0; j < 16; j++) out[T] += in[T * 256 + j];  // <-   16 x 256
}
RUN(rows_and_columns_swapped, 1, 64)

// expect: global-out-of-bounds | global-out-of-bounds
KERNEL(a_vector_over_the_end) {
    const float4 v = ((const float4*)in)[T + 1023];  // <-
    out[T] = v.x;
}
RUN(a_vector_over_the_end, 1, 32)

// expect: global-out-of-bounds misaligned | global-out-of-bounds
KERNEL(a_vector_that_begins_inside) {
    const float2* p = (const float2*)(in + 4095);
    out[T] = p[0].x + p[0].y;  // <-
}
RUN(a_vector_that_begins_inside, 1, 1)

// expect: shared-out-of-bounds index-out-of-bounds | -
KERNEL(the_neighbour_of_the_last) {
    __shared__ float s[64];
    s[T] = in[T];
    __syncthreads();
    out[T] = s[T + 1];  // <-
}
RUN(the_neighbour_of_the_last, 1, 64)

// expect: shared-out-of-bounds | -
KERNEL(into_the_next_array) {
    __shared__ float a[64], b[64];
    float *p = a + n, *q = b;
    q[T] = 0;
    p[T] = in[T];  // <-
    __syncthreads();
    out[T] = a[T] + b[T];
}
RUN(into_the_next_array, 1, 64)

__global__ void another(float* p) {
    __shared__ float its[1024];
    its[threadIdx.x] = p[threadIdx.x];
    __syncthreads();
    p[threadIdx.x] = its[31 - threadIdx.x];
}
// expect: shared-out-of-bounds | -
__device__ __noinline__ void put(float* p, int i, float v) { p[i] = v; }  // <-
KERNEL(into_the_array_of_another_kernel) {
    __shared__ float mine[32];
    mine[T] = in[T];
    if (T == 0) put(mine, n * 4, 7.f), put(mine, -n * 4, 7.f);  // <-
    __syncwarp();
    out[T] = mine[T];
}
RUN(into_the_array_of_another_kernel, 1, 32)

// expect: index-out-of-bounds shared-out-of-bounds | -
KERNEL(a_column_too_many) {
    __shared__ float s[16][16];
    for (int j = 0; j <= 16; j++) s[T][j] = in[j];  // <-
    __syncthreads();
    out[T] = s[T][0];
}
RUN(a_column_too_many, 1, 16)

// expect: index-out-of-bounds | -
KERNEL(a_local_array_too_short) {
    float row[4];
    for (int i = 0; i < 4; i++) row[i] = in[i];
    for (int i = 0; i < 8; i++) out[i * 64 + T] = row[i % (n / 8)];  // <-
}
RUN(a_local_array_too_short, 1, 32)

// expect: shared-out-of-bounds | -
KERNEL(bytes_for_elements) {
    extern __shared__ float dynamic[];
    dynamic[T] = in[T];  // <-
    __syncthreads();
    out[T] = dynamic[63 - T];  // <-
}
RUN(bytes_for_elements, 1, 64, 64)

// expect: shared-out-of-bounds | shared-out-of-bounds
KERNEL(ldmatrix_beyond_the_tile) {
    extern __shared__ __align__(16) __half halves[];
    for (int i = T; i < 128; i += 32) halves[i] = __float2half(1);
    __syncwarp();
    uint32_t r[4];
    ldmatrix_x4(r, smem_u32(halves + T * 8));  // <-
    out[T] = r[0];
}
RUN(ldmatrix_beyond_the_tile, 1, 32, 256)

// expect: global-out-of-bounds | global-out-of-bounds
KERNEL(an_index_that_wraps) {
    const int stride = n * 1024 * 1024;
    out[T] = in[stride * (int)(T + 33)];  // <-
}
RUN(an_index_that_wraps, 1, 32)

// expect: global-out-of-bounds | global-out-of-bounds
__global__ void a_null_pointer(const float* in, float* out, const float* bias) { out[threadIdx.x] = in[0] + bias[0]; }  // <-
extern "C" int run_a_null_pointer(const float* in, float* out, int n) {
    a_null_pointer<<<1, 32>>>(in, out, nullptr);
    return cudaGetLastError();
}

// expect: read-only | -
KERNEL(a_store_to_the_input) { ((float*)in)[T] = 0; }  // <-
RUN(a_store_to_the_input, 1, 32)

// expect: stack-overflow | stack-overflow
__device__ __noinline__ float fibonacci(float* out, int n) {  // <-
    volatile float keep[64];  // <-
    keep[n & 63] = n;
    return n == 7 ? keep[0] : fibonacci(out, n + 1) + fibonacci(out, n + 2) + keep[1];  // <-
}
KERNEL(a_recursion_without_end) { out[T] = fibonacci(out, n); }  // <-
RUN(a_recursion_without_end, 1, 1)

// expect: global-out-of-bounds | -
KERNEL(a_pointer_to_another_threads_local) {
    __shared__ float* p;
    float mine = in[T];
    if (T == 0) p = &mine;
    __syncthreads();
    out[T] = *p;  // <-
    __syncthreads();
    if (n < 0) mine = 0;
    out[T] += mine;
}
RUN(a_pointer_to_another_threads_local, 1, 64)

// expect: misaligned | -
KERNEL(a_vector_from_shared_memory) {
    __shared__ __align__(16) float s[132];
    for (int i = T; i < 132; i += 32) s[i] = in[i];
    __syncwarp();
    ((float4*)out)[T] = ((float4*)(s + 1))[T];  // <-
}
RUN(a_vector_from_shared_memory, 1, 32)

// expect: misaligned | global-out-of-bounds
KERNEL(rows_padded_by_one_word) {
    __shared__ __align__(16) float tile[32][33];
    for (int j = 0; j < 32; j++) tile[T][j] = in[T * 32 + j];
    __syncwarp();
    for (int j = 0; j < 32; j += 4) *(float4*)(out + T * 32 + j) = *(const float4*)&tile[T][j];  // <-
}
RUN(rows_padded_by_one_word, 1, 32)

// expect: misaligned | -
KERNEL(a_double_from_floats) { out[T] = (float)*(const double*)(in + T); }  // <-
RUN(a_double_from_floats, 1, 32)

// expect: shared-out-of-bounds | -
KERNEL(a_negative_row) {
    __shared__ float s[64];
    float* p = s;
    p[T] = in[T];
    __syncthreads();
    out[T] = p[(int)T - 1];  // <-
}
RUN(a_negative_row, 1, 64)

// expect: global-out-of-bounds | global-out-of-bounds
KERNEL(an_address_of_nowhere) { out[T] = *(const float*)(0x123456789000 + 4 * T); }  // <-
RUN(an_address_of_nowhere, 1, 32)

// expect: not-shared | not-shared
KERNEL(ldmatrix_of_global_memory) {
    uint32_t r[4];
    ldmatrix_x4(r, smem_u32(in + T * 4));  // <-
    out[T] = r[0];
}
RUN(ldmatrix_of_global_memory, 1, 32)

// ==== global memory: who is first? ===============================================================
// expect: global-race lanes-disagree | -
KERNEL(a_sum_in_global_memory) { out[0] += in[T]; }  // <-
RUN(a_sum_in_global_memory, 1, 128)

// expect: global-race | -
KERNEL(vectors_copied_to_one_place) { ((float4*)out)[T % 32] = ((const float4*)in)[T]; }  // <-
RUN(vectors_copied_to_one_place, 1, 64)

// expect: race | -
KERNEL(vectors_copied_to_one_place_of_shared_memory) {
    __shared__ float4 s[32];
    s[T % 32] = ((const float4*)in)[T];  // <-
    __syncthreads();
    out[T] = s[T % 32].x;
}
RUN(vectors_copied_to_one_place_of_shared_memory, 1, 64)

// expect: global-race | -
KERNEL(a_stencil_in_place) {
    const int i = blockIdx.x * 64 + T;
    const float left = i ? out[i - 1] : 0, right = out[i + 1];  // <-
    out[i] = (left + right) / 2;  // <-
}
RUN(a_stencil_in_place, 4, 64)

// expect: global-race | -
KERNEL(blocks_that_write_one_word) {
    if (T == 0) out[0] = blockIdx.x;  // <-
}
RUN(blocks_that_write_one_word, 4, 32)

// expect: global-race | -
__device__ unsigned blocks_done;
KERNEL(a_last_block_without_fence) {
    __shared__ bool last;
    if (T == 0) {
        out[blockIdx.x] = in[blockIdx.x];  // <-
        last = atomicAdd(&blocks_done, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && T == 0) {
        float sum = 0;
        for (int i = 0; i < (int)gridDim.x; i++) sum += out[i];  // <-
        out[64] = sum;
        blocks_done = 0;
    }
}
RUN(a_last_block_without_fence, 4, 32)

// expect: global-race | -
KERNEL(an_atomic_and_a_store) {
    if (T == 0) out[0] = 5;  // <-
    atomicAdd(out, 1.f);     // <-
}
RUN(an_atomic_and_a_store, 1, 64)

// expect: global-race | -
KERNEL(a_split_that_is_merged_too_early) {  // block 1 reads what block 0 writes
    if (blockIdx.x == 0) out[T] = in[T];         // <-
    else out[64 + T] = out[T] * 2;               // <-
}
RUN(a_split_that_is_merged_too_early, 2, 64)

// expect: global-race | -
__device__ float total;
KERNEL(a_device_variable) {
    if (T == 0) total += in[blockIdx.x];  // <-
}
RUN(a_device_variable, 4, 32)

// expect: global-race | -
KERNEL(a_memset_by_every_block) {
    if (T == 0) memset(out, blockIdx.x, 64);  // <-
}
RUN(a_memset_by_every_block, 4, 32)

// expect: race | -
KERNEL(a_memcpy_without_barrier) {
    __shared__ float s[64];
    if (T == 0) memcpy(s, in, sizeof s);  // <-
    out[T] = s[T];  // <-
}
RUN(a_memcpy_without_barrier, 1, 64)

// ==== not all take the same way ==================================================================
// expect: exited-threads deadlock divergent | exited-threads deadlock divergent
KERNEL(an_early_return) {
    __shared__ float s[64];
    if (T >= 48) return;  // meant: no store
    s[T] = in[T];
    __syncthreads();  // <-
    out[T] = s[47 - T];
}
RUN(an_early_return, 1, 64)

// expect: exited-threads deadlock | exited-threads deadlock
KERNEL(a_barrier_for_the_first_warp) {
    __shared__ float s[64];
    s[T] = in[T];
    if (T < 32) {
        __syncthreads();  // <-
        out[T] = s[T + 32];
    }
}
RUN(a_barrier_for_the_first_warp, 1, 64)

// expect: divergent | divergent
KERNEL(a_barrier_in_both_branches) {
    __shared__ float s[64];
    s[T] = in[T];
    if (T < 32) {
        __syncthreads();  // <-
        out[T] = s[T + 32];
    } else {
        __syncthreads();  // <-
        out[T] = s[T - 32];
    }
}
RUN(a_barrier_in_both_branches, 1, 64)

// expect: divergent exited-lanes | divergent exited-lanes
KERNEL(a_shuffle_for_the_rows_that_count) {
    float v = in[T];
    if (T < 20) v += __shfl_down_sync(~0u, v, 1);  // <-
    __syncwarp();  // <-
    out[T] = v;
}
RUN(a_shuffle_for_the_rows_that_count, 1, 32)

// expect: mask-without-self | mask-without-self
KERNEL(a_mask_of_eight) {
    float v = in[T];
    v += __shfl_xor_sync(0xff, v, 4);  // <-
    out[T] = v;
}
RUN(a_mask_of_eight, 1, 32)

// expect: shuffle-lane | shuffle-lane
KERNEL(a_lane_of_the_other_half) {
    if (T < 16) out[T] = __shfl_sync(0xffff, in[T], 16 + T);  // <-
}
RUN(a_lane_of_the_other_half, 1, 32)

// expect: exited-lanes divergent | exited-lanes divergent
KERNEL(a_vote_of_those_who_are_left) {
    int left = T;
    while (__any_sync(~0u, left > 0)) {  // <-
        if (left == 0) return;
        left--;
    }
    out[T] = left;
}
RUN(a_vote_of_those_who_are_left, 1, 32)

// expect: lanes-missing divergent exited-lanes | lanes-missing divergent exited-lanes
KERNEL(an_mma_in_a_branch) {
    float c[4] = {};
    const uint32_t a[4] = {};
    if (T < 16) mma_m16n8k16(c, a, 0, 0);  // <-
    out[T] = c[0];
}
RUN(an_mma_in_a_branch, 1, 32)

// expect: lanes-missing divergent deadlock | lanes-missing divergent deadlock
KERNEL(ldmatrix_for_the_first_rows) {
    __shared__ __align__(16) __half tile[32 * 8];
    for (int i = 0; i < 8; i++) tile[T * 8 + i] = __float2half(0);
    __syncwarp();
    uint32_t r[2] = {};
    if (T < 16) ldmatrix_x2(r, smem_u32(tile + T * 8));  // <-
    out[T] = r[0];
}
RUN(ldmatrix_for_the_first_rows, 1, 32)

// expect: barrier-arguments | barrier-arguments
KERNEL(a_named_barrier_for_forty) { named_barrier_sync(1, 40); }  // <-
RUN(a_named_barrier_for_forty, 1, 64)

// expect: deadlock | deadlock
KERNEL(a_named_barrier_nobody_arrives_at) {
    if (T < 32) named_barrier_sync(1, 64);  // <-
    else named_barrier_sync(2, 64);  // <-
}
RUN(a_named_barrier_nobody_arrives_at, 1, 64)

// expect: divergent deadlock exited-threads | divergent deadlock exited-threads
__device__ float block_sum(float v) {
    __shared__ float s[64];
    s[T] = v;
    __syncthreads();  // <-
    float sum = 0;
    for (int i = 0; i < 64; i++) sum += s[i];
    return sum;
}
KERNEL(a_barrier_inside_a_function) {
    if (T % 2) out[T] = block_sum(in[T]);
}
RUN(a_barrier_inside_a_function, 1, 64)

// expect: divergent deadlock | divergent deadlock
KERNEL(a_barrier_meets_a_shuffle) {
    if (T < 16) __syncthreads();  // <-
    else out[T] = __shfl_sync(0xffffffff, in[T], 16);  // <-
}
RUN(a_barrier_meets_a_shuffle, 1, 32)

// ==== a thread that stops, or never does =========================================================
// expect: assert | assert
KERNEL(an_assertion) {
    assert(in[T] < 60);  // <-
    out[T] = 1;
}
RUN(an_assertion, 1, 64)

// expect: trap | trap
KERNEL(a_trap) {
    if (in[T] == 40) __trap();  // <-
    out[T] = 1;
}
RUN(a_trap, 1, 64)

// expect: division-by-zero | division-by-zero
KERNEL(a_modulo_by_zero) { out[T] = (int)in[T] % (n - 64 + (int)T / 32 * 0); }  // <-
RUN(a_modulo_by_zero, 1, 64)

// expect: timeout | timeout
KERNEL(a_loop_whose_step_is_zero) {
    for (int i = 0; i < n; i += n / 65) out[T] = i;  // <-
}
RUN(a_loop_whose_step_is_zero, 1, 32)

// expect: timeout | timeout
KERNEL(a_lock_that_nobody_opens) {
    while (atomicCAS((int*)out, 0, 1) != 0) {}  // <-
}
RUN(a_lock_that_nobody_opens, 1, 64)

// expect: timeout | timeout
KERNEL(a_flag_that_is_never_set) {
    volatile float* flag = out;
    while (flag[0] == 0) {}  // <-
}
RUN(a_flag_that_is_never_set, 1, 32)

// expect: host-call | host-call
KERNEL(memory_from_the_heap) {
    volatile float* p = (float*)malloc(16);  // <-
    p[0] = in[T];
    out[T] = p[0];
    free((void*)p);
}
RUN(memory_from_the_heap, 1, 32)

#ifdef SIMT_EMULATED  // these nvcc refuses itself
// expect: host-call | host-call
KERNEL(an_exit) {
    if (T == 3) exit(1);  // <-
}
RUN(an_exit, 1, 32)

// expect: host-call | host-call
KERNEL(an_exception) {
    if (in[T] > 10) throw 1;  // <-
}
RUN(an_exception, 1, 32)

__global__ void child(float* p) { p[threadIdx.x] = 1; }
// expect: launch-in-kernel | launch-in-kernel
KERNEL(a_launch) { child<<<1, 32>>>(out); }  // <-
RUN(a_launch, 1, 1)

// expect: trap | trap
KERNEL(code_that_must_not_be_reached) {
    if (n > 0) __builtin_trap();  // <-
    out[T] = 1;
}
RUN(code_that_must_not_be_reached, 1, 32)
#endif


// ==== the launch =================================================================================
// expect: launch-configuration | launch-configuration
KERNEL(too_many_threads) { out[T] = 1; }
RUN(too_many_threads, 1, 1025)

// expect: launch-configuration | launch-configuration
KERNEL(shared_memory_above_48_kb) { out[T] = 1; }
RUN(shared_memory_above_48_kb, 1, 32, 49 * 1024)

// expect: launch-configuration | launch-configuration
KERNEL(a_grid_on_y) { out[T] = 1; }
RUN(a_grid_on_y, dim3(1, 70000), 32)

// expect: launch-configuration | launch-configuration
KERNEL(a_negative_grid) { out[T] = 1; }
RUN(a_negative_grid, (n - 4096) / 32, 32)
