// Kernels with one mistake each, as learners make them. Beside or above each: what a watched build has to find, then a fast one
// ("-": nothing, since it sees only what goes through the runtime), then words of the message, a regular expression.
// `// <-` marks lines that the finding may name.
// Every entry is called with in[4096] = 1, 2, 3 ..., out[4096] = 0 and n = 64 (test_mistakes.py).
#include "ptx.cuh"
#include <assert.h>
#include <stdlib.h>

#define HEAD(name) __global__ void name(const float* in, float* out, int n)
#define KERNEL(name, ...) /* and how it is launched */ \
    HEAD(name); \
    extern "C" void run_##name(const float* in, float* out, int n) { name<<<__VA_ARGS__>>>(in, out, n); } \
    HEAD(name)
#define T threadIdx.x

// ==== shared memory: no barrier ==================================================================
KERNEL(reduce_without_barrier, 1, 128) {  // expect: race | -; that thread 0 read in line .*, with no barrier between
    __shared__ float s[128];
    s[T] = in[T];
    __syncthreads();
    for (int d = 64; d; d /= 2)
        if (T < d) s[T] += s[T + d];  // <-
    if (T == 0) out[0] = s[0];
}

KERNEL(reduce_last_warp_unrolled, 1, 64) {  // expect: race | -
    __shared__ float s[64];
    s[T] = in[T];
    __syncthreads();
    if (T < 32) s[T] += s[T + 32];  // <-
    if (T < 16) s[T] += s[T + 16];  // <-
    if (T < 8) s[T] += s[T + 8];    // <-
    if (T == 0) out[0] = s[0];      // <-
}

KERNEL(a_named_barrier_for_half, 1, 128) {  // expect: race | -
    __shared__ float s[128];
    s[T] = in[T];                 // <-
    named_barrier_sync(1 + T / 64, 64);
    out[T] = s[127 - T];          // <-
}

KERNEL(syncwarp_for_the_block, 1, 128) {  // expect: race | -
    __shared__ float s[128];
    s[T] = in[T];          // <-
    __syncwarp();
    out[T] = s[127 - T];   // <-
}

KERNEL(reset_beside_the_atomics, 1, 64) {  // expect: race | -
    __shared__ int count;
    if (T == 0) count = 0;  // <-
    atomicAdd(&count, 1);   // <-
    __syncthreads();
    if (T == 0) out[0] = count;
}

KERNEL(two_warps_one_word, 1, 64) {  // expect: race | -; Both write there: has each thread a place of its own
    __shared__ int last;
    last = T / 32;  // <-
    __syncthreads();
    out[T] = last;
}

KERNEL(a_byte_of_a_word, 1, 128) {  // expect: race | -
    __shared__ unsigned words[32];
    if (T < 32) words[T] = 0;  // <-
    ((unsigned char*)words)[T] = 1;  // <-
    __syncthreads();
    if (T < 32) out[T] = words[T];
}

KERNEL(ldmatrix_without_barrier, 1, 64) {  // expect: race | -
    __shared__ __align__(16) __half tile[64 * 8];
    for (int i = 0; i < 8; i++) tile[T * 8 + i] = __float2half(in[T * 8 + i]);  // <-
    uint32_t r[4];
    ldmatrix_x4(r, smem_u32(tile + (T ^ 32) * 8));  // <-
    out[T] = r[0] + r[1] + r[2] + r[3];
}

KERNEL(stmatrix_without_barrier, 1, 64) {  // expect: race | -
    __shared__ __align__(16) __half tile[64 * 8];
    const uint32_t r[4] = {pack(in[T], 1), pack(2, 3), pack(4, 5), pack(6, 7)};
    stmatrix_x4(smem_u32(tile + T * 8), r);  // <-
    out[T] = __half2float(tile[511 - T]);    // <-
}

KERNEL(lanes_of_a_warp_disagree, 1, 32) {  // expect: lanes-disagree race | -
    __shared__ float s[4];
    s[T % 4] = in[T];  // <-
    __syncwarp();
    out[T] = s[T % 4];
}

// ==== copies =====================================================================================
// expect: read-before-wait | -; that a cp.async of thread 0 in line .* is still filling
KERNEL(a_wait_too_weak, 1, 32) {
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

KERNEL(a_barrier_before_the_wait, 1, 64) {  // expect: read-before-wait | -; then a barrier
    __shared__ __align__(16) float s[256];
    cp_async<16>(smem_u32(s + T * 4), in + T * 4);  // <-
    cp_async_commit();
    __syncthreads();
    cp_async_wait<0>();
    out[T] = s[255 - T];  // <-
}

KERNEL(a_prefetch_into_the_tile_in_use, 1, 64) {  // expect: stage-overwritten | -; the stage is still in use
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

// expect: read-before-wait never-waited | never-waited; is still filling|its group was never committed
KERNEL(a_copy_without_commit, 1, 32) {
    __shared__ __align__(16) float s[128];
    cp_async<16>(smem_u32(s + T * 4), in + T * 4);  // <-
    cp_async_wait<0>();
    __syncthreads();
    out[T] = s[T * 4];  // <-
}

KERNEL(a_copy_that_nobody_waits_for, 1, 32) {  // expect: never-waited | never-waited; its group was never waited for
    __shared__ __align__(16) float s[128];
    cp_async<16>(smem_u32(s + T * 4), in + T * 4);  // <-
    cp_async_commit();
    out[T] = 0;
}

KERNEL(more_source_bytes_than_a_copy, 1, 32) {  // expect: copy-size | copy-size; 64 source bytes of 16
    __shared__ __align__(16) float s[128];
    cp_async<16>(smem_u32(s + T * 4), in + T * 4, n);  // <-
    cp_async_wait_all();
    out[T] = s[T * 4];
}

// expect: misaligned | misaligned; cp.async .* 16 bytes of shared memory at an address that is no multiple of 16
KERNEL(a_copy_to_an_odd_row, 1, 32) {
    __shared__ __align__(16) float s[32][5];  // rows of 20 bytes
    cp_async<16>(smem_u32(&s[T][0]), in + T * 4);  // <-
    cp_async_wait_all();
    out[T] = s[T][0];
}

// expect: misaligned | misaligned; cp.async .* 16 bytes of global memory at an address that is no multiple of 16
KERNEL(a_copy_from_an_odd_place, 1, 16) {
    __shared__ __align__(16) float s[64];
    cp_async<16>(smem_u32(s + T * 4), in + 1 + T * 4);  // <-
    cp_async_wait_all();
    out[T] = s[T * 4];
}

// expect: global-out-of-bounds | global-out-of-bounds; cp.async .* element 4096 of in .*, 16 bytes past its end
KERNEL(a_tail_tile_that_is_not_masked, 1, 32) {
    __shared__ __align__(16) float s[128];
    for (int tile = 0; tile < 33; tile++) {  // 4096 are 32 tiles
        cp_async<16>(smem_u32(s + T * 4), in + tile * 128 + T * 4);  // <-
        cp_async_wait_all();
        out[T] += s[T * 4];
    }
}

KERNEL(a_copy_beyond_its_stage, 1, 32, 1024) {  // expect: shared-out-of-bounds | shared-out-of-bounds
    extern __shared__ __align__(16) float dynamic[];
    cp_async<16>(smem_u32(dynamic + 128 * (n / 32) + T * 4), in + T * 4);  // <-
    cp_async_wait_all();
    out[T] = dynamic[T];
}

KERNEL(a_store_into_a_copy, 1, 32) {  // expect: stage-overwritten race | -
    __shared__ __align__(16) float s[128];
    cp_async<16>(smem_u32(s + T * 4), in + T * 4);  // <-
    cp_async_commit();
    s[T * 4] = 0;  // <-
    cp_async_wait<0>();
    __syncwarp();
    out[T] = s[T];
}

// ==== never set ==================================================================================
KERNEL(a_halo_that_nobody_fills, 1, 64) {  // expect: uninitialised-shared | -; that nobody has written: s at byte 260
    __shared__ float s[66];
    s[T + 1] = in[T];
    __syncthreads();
    out[T] = s[T] + s[T + 2];  // <-
}

KERNEL(an_atomic_that_starts_nowhere, 1, 64) {  // expect: uninitialised-shared | -
    __shared__ int bins[8];
    atomicAdd(&bins[T % 8], 1);  // <-
    __syncthreads();
    if (T < 8) out[T] = bins[T];
}

KERNEL(an_accumulator, 1, 64) {  // expect: uninitialised-local | uninitialised-local -; a value that was never set
    float sum;
    for (int i = 0; i < n; i++) sum += in[i * 64 + T];
    out[T] = sum;  // <-
}

// expect: uninitialised-local | uninitialised-local; registers that were never set .accumulator.
KERNEL(accumulators_of_an_mma, 1, 32) {
    float c[4];
    const uint32_t a[4] = {pack(1, 1), pack(1, 1), pack(1, 1), pack(1, 1)};
    mma_m16n8k16(c, a, pack(1, 1), pack(1, 1));  // <-
    out[T] = c[0];
}

KERNEL(a_shuffle_of_nothing, 1, 32) {  // expect: uninitialised-local | uninitialised-local
    float v;
    if (n < 0) v = in[T];
    out[T] = __shfl_xor_sync(~0u, v, 1);  // <-
}

KERNEL(an_array_filled_halfway, 1, 64) {  // expect: uninitialised-local | -
    float row[8];
    for (int i = 0; i < 4; i++) row[i] = in[i * 64 + T];
    for (int i = 0; i < 8; i++) out[i * 64 + T] = row[(i + n) % 8];  // <-
}

// expect: uninitialised-shared | -; reads with ldmatrix in line .* tile at byte 384
KERNEL(ldmatrix_of_rows_nobody_filled, 1, 32) {
    __shared__ __align__(16) __half tile[32 * 8];
    if (T < 24)
        for (int i = 0; i < 8; i++) tile[T * 8 + i] = __float2half(in[i]);
    __syncwarp();
    uint32_t r[4];
    ldmatrix_x4(r, smem_u32(tile + T * 8));  // <-
    out[T] = r[0];
}

// expect: uninitialised-shared | -; thread 0 of block 1 reads
KERNEL(a_buffer_of_the_block_before, 2, 64) {  // shared memory does not outlive its block
    __shared__ float s[64];
    if (blockIdx.x == 0) s[T] = in[T];
    __syncthreads();
    out[blockIdx.x * 64 + T] = s[T];  // <-
}

// ==== bounds =====================================================================================
// expect: global-out-of-bounds | global-out-of-bounds; block 16 .* element 4096 of out .shape \[4096\]., [14] byte
KERNEL(no_guard, 17, 256) { out[blockIdx.x * blockDim.x + T] = 1; }  // <-

// expect: global-out-of-bounds | global-out-of-bounds; 4 bytes before the start of in
KERNEL(the_element_before_the_first, 1, 64) { out[T] = in[(int)T - 1]; }  // <-

KERNEL(a_vector_that_begins_inside, 1, 1) {  // expect: global-out-of-bounds misaligned | global-out-of-bounds
    const float2* p = (const float2*)(in + 4095);
    out[T] = p[0].x + p[0].y;  // <-
}

// expect: shared-out-of-bounds index-out-of-bounds | -; index 64 of an array of type float \[64\]
KERNEL(the_neighbour_of_the_last, 1, 64) {
    __shared__ float s[64];
    s[T] = in[T];
    __syncthreads();
    out[T] = s[T + 1];  // <-
}

KERNEL(into_the_next_array, 1, 64) {  // expect: shared-out-of-bounds | -; 4 bytes beyond the end of a .256 bytes
    __shared__ float a[64], b[64];
    float *p = a + n, *q = b;
    q[T] = 0;
    p[T] = in[T];  // <-
    __syncthreads();
    out[T] = a[T] + b[T];
}

// expect: shared-out-of-bounds | - global-out-of-bounds; the launch asked for 0|belongs to no argument
KERNEL(far_beyond_every_array, 1, 64) {
    __shared__ float s[64];
    float* p = s;
    p[T + 1024 * n] = in[T];  // <-
    __syncthreads();
    out[T] = s[T];
}

__global__ void another(float* p) {
    __shared__ float its[1024];
    its[threadIdx.x] = p[threadIdx.x];
    __syncthreads();
    p[threadIdx.x] = its[31 - threadIdx.x];
}
// expect: shared-out-of-bounds | -
__device__ __noinline__ void put(float* p, int i, float v) { p[i] = v; }  // <-
KERNEL(into_the_array_of_another_kernel, 1, 32) {
    __shared__ float mine[32];
    mine[T] = in[T];
    if (T == 0) put(mine, n * 4, 7.f), put(mine, -n * 4, 7.f);  // <-
    __syncwarp();
    out[T] = mine[T];
}

KERNEL(a_local_array_too_short, 1, 32) {  // expect: index-out-of-bounds | -
    float row[4];
    for (int i = 0; i < 4; i++) row[i] = in[i];
    for (int i = 0; i < 8; i++) out[i * 64 + T] = row[i % (n / 8)];  // <-
}

// expect: shared-out-of-bounds | -; bytes 64 to 67 of dynamic shared memory; the launch asked for 64
KERNEL(bytes_for_elements, 1, 64, 64) {
    extern __shared__ float dynamic[];
    dynamic[T] = in[T];  // <-
    __syncthreads();
    out[T] = dynamic[63 - T];  // <-
}

// expect: shared-out-of-bounds | shared-out-of-bounds; thread 16 of block 0 reads with ldmatrix
KERNEL(ldmatrix_beyond_the_tile, 1, 32, 256) {
    extern __shared__ __align__(16) __half halves[];
    for (int i = T; i < 128; i += 32) halves[i] = __float2half(1);
    __syncwarp();
    uint32_t r[4];
    ldmatrix_x4(r, smem_u32(halves + T * 8));  // <-
    out[T] = r[0];
}

// expect: global-out-of-bounds | global-out-of-bounds; null pointer
__global__ void a_null_pointer(const float* in, float* out, const float* bias) { out[threadIdx.x] = in[0] + bias[0]; }  // <-
extern "C" int run_a_null_pointer(const float* in, float* out, int n) {
    a_null_pointer<<<1, 32>>>(in, out, nullptr);
    return cudaGetLastError();
}

// expect: read-only | -; in, which the entry declares const
KERNEL(a_store_to_the_input, 1, 32) { ((float*)in)[T] = 0; }  // <-

// expect: stack-overflow | stack-overflow; more than 640 KB of local memory
__device__ __noinline__ float fibonacci(float* out, int n) {  // <-
    volatile float keep[64];  // <-
    keep[n & 63] = n;
    return n == 7 ? keep[0] : fibonacci(out, n + 1) + fibonacci(out, n + 2) + keep[1];  // <-
}
KERNEL(a_recursion_without_end, 1, 1) { out[T] = fibonacci(out, n); }  // <-

// expect: global-out-of-bounds | -; local memory of another thread
KERNEL(a_pointer_to_another_threads_local, 1, 64) {
    __shared__ float* p;
    float mine = in[T];
    if (T == 0) p = &mine;
    __syncthreads();
    out[T] = *p;  // <-
    __syncthreads();
    if (n < 0) mine = 0;
    out[T] += mine;
}

KERNEL(rows_padded_by_one_word, 1, 32) {  // expect: misaligned | global-out-of-bounds
    __shared__ __align__(16) float tile[32][33];
    for (int j = 0; j < 32; j++) tile[T][j] = in[T * 32 + j];
    __syncwarp();
    for (int j = 0; j < 32; j += 4) *(float4*)(out + T * 32 + j) = *(const float4*)&tile[T][j];  // <-
}

// expect: misaligned | -; 8 bytes of global memory at an address that is no multiple of 8
KERNEL(a_double_from_floats, 1, 32) { out[T] = (float)*(const double*)(in + T); }  // <-

KERNEL(a_negative_row, 1, 64) {  // expect: shared-out-of-bounds | -
    __shared__ float s[64];
    float* p = s;
    p[T] = in[T];
    __syncthreads();
    out[T] = p[(int)T - 1];  // <-
}

// expect: global-out-of-bounds | global-out-of-bounds; belongs to no argument|wild
KERNEL(an_address_that_no_processor_has, 1, 32) { out[T] = *(const float*)(1ull << 62); }  // <-

KERNEL(ldmatrix_of_global_memory, 1, 32) {  // expect: not-shared | not-shared; a pointer that does not point there
    uint32_t r[4];
    ldmatrix_x4(r, smem_u32(in + T * 4));  // <-
    out[T] = r[0];
}

// ==== global memory: who is first? ===============================================================
// expect: global-race lanes-disagree | -; element 0 of out, which thread 31 wrote
KERNEL(a_sum_in_global_memory, 1, 128) { out[0] += in[T]; }  // <-

// expect: global-race | -
KERNEL(vectors_copied_to_one_place, 1, 64) { ((float4*)out)[T % 32] = ((const float4*)in)[T]; }  // <-

KERNEL(blocks_that_write_one_word, 4, 32) {  // expect: global-race | -; only one of the two is kept
    if (T == 0) out[0] = blockIdx.x;  // <-
}

KERNEL(an_atomic_and_a_store, 1, 64) {  // expect: global-race | -
    if (T == 0) out[0] = 5;  // <-
    atomicAdd(out, 1.f);     // <-
}

// expect: global-race | -; total, which thread 0 of block .* nothing orders two blocks
__device__ float total;
KERNEL(a_device_variable, 4, 32) {
    if (T == 0) total += in[blockIdx.x];  // <-
}

KERNEL(a_memcpy_without_barrier, 1, 64) {  // expect: race | -
    __shared__ float s[64];
    if (T == 0) memcpy(s, in, sizeof s);  // <-
    out[T] = s[T];  // <-
}

// ==== not all take the same way ==================================================================
KERNEL(a_barrier_in_both_branches, 1, 64) {  // expect: divergent | divergent
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

// expect: divergent exited-lanes | divergent exited-lanes; comes to __syncwarp .* thread 0 waits in a shuffle
KERNEL(a_shuffle_for_the_rows_that_count, 1, 32) {
    float v = in[T];
    if (T < 20) v += __shfl_down_sync(~0u, v, 1);  // <-
    __syncwarp();  // <-
    out[T] = v;
}

// expect: divergent | divergent; meets thread 0 in a shuffle, but comes from another place
KERNEL(two_shuffles_for_one, 1, 32) {
    float v = in[T];
    if (T < 16) v += __shfl_xor_sync(~0u, v, 1);  // <-
    else v += __shfl_xor_sync(~0u, v, 2);         // <-
    out[T] = v;
}

KERNEL(a_shuffle_for_those_who_are_gone, 1, 32) {  // expect: exited-lanes | exited-lanes; lanes 16-31
    float v = in[T];
    if (T < 16) v += __shfl_xor_sync(~0u, v, 1);  // <-
    out[T] = v;
}

// expect: mask-without-self | mask-without-self; the mask 0x000000ff, in which its own lane, 8, is missing
KERNEL(a_mask_of_eight, 1, 32) {
    float v = in[T];
    v += __shfl_xor_sync(0xff, v, 4);  // <-
    out[T] = v;
}

KERNEL(a_lane_of_the_other_half, 1, 32) {  // expect: shuffle-lane | shuffle-lane; lane 16, which does not take part
    if (T < 16) out[T] = __shfl_sync(0xffff, in[T], 16 + T);  // <-
}

// expect: lanes-missing | lanes-missing; lanes 0-15 only, but it needs all 32: the warp has only 16
KERNEL(an_mma_of_half_a_warp, 1, 16) {
    float c[4] = {};
    const uint32_t a[4] = {};
    mma_m16n8k16(c, a, 0, 0);  // <-
    out[T] = c[0];
}

// expect: divergent deadlock | divergent deadlock; 32 threads of 32 left, and none can go on
KERNEL(a_barrier_meets_a_shuffle, 1, 32) {
    if (T < 16) __syncthreads();  // <-
    else out[T] = __shfl_sync(0xffffffff, in[T], 16);  // <-
}

// ==== a thread that stops, or never does =========================================================
KERNEL(an_assertion, 1, 64) {  // expect: assert | assert; thread 59 of block 0 fails the assertion `in.T. < 60`
    assert(in[T] < 60);  // <-
    out[T] = 1;
}

KERNEL(a_trap, 1, 64) {  // expect: trap | trap; thread 39 of block 0 stops
    if (in[T] == 40) __trap();  // <-
    out[T] = 1;
}

// expect: division-by-zero | division-by-zero; divides an integer by zero
KERNEL(a_modulo_by_zero, 1, 64) { out[T] = (int)in[T] % (n - 64 + (int)T / 32 * 0); }  // <-

KERNEL(a_loop_whose_step_is_zero, 1, 32) {  // expect: timeout | timeout; was still running in line
    for (int i = 0; i < n; i += n / 65) out[T] = i;  // <-
}

KERNEL(a_lock_that_nobody_opens, 1, 64) {  // expect: timeout | timeout
    while (atomicCAS((int*)out, 0, 1) != 0) {}  // <-
}

KERNEL(memory_from_the_heap, 1, 32) {  // expect: host-call | host-call
    volatile float* p = (float*)malloc(16);  // <-
    p[0] = in[T];
    out[T] = p[0];
    free((void*)p);
}

#ifdef SIMT_EMULATED  // these nvcc refuses itself
KERNEL(an_exception, 1, 32) {  // expect: host-call | host-call
    if (in[T] > 10) throw 1;  // <-
}

__global__ void child(float* p) { p[threadIdx.x] = 1; }
// expect: launch-in-kernel | launch-in-kernel
KERNEL(a_launch, 1, 1) { child<<<1, 32>>>(out); }  // <-

#endif

// ==== the launch =================================================================================
// expect: launch-configuration | launch-configuration; 50176 bytes of dynamic shared memory .* cudaFuncSetAttribute
KERNEL(shared_memory_above_48_kb, 1, 32, 49 * 1024) { out[T] = 1; }

// expect: launch-configuration | launch-configuration
KERNEL(a_negative_grid, (n - 4096) / 32, 32) { out[T] = 1; }
