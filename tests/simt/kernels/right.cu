// Kernels that look like the mistakes of mistakes.cu, and are right: nothing is found, and out[0] is what the comment says.
// Every entry is called as there: in[4096] = 1, 2, 3 ..., out[4096] = 0, n = 64.
#include "ptx.cuh"
#include <assert.h>

#define HEAD(name) __global__ void name(const float* in, float* out, int n)
#define KERNEL(name, ...) /* and how it is launched */ \
    HEAD(name); \
    extern "C" void run_##name(const float* in, float* out, int n) { name<<<__VA_ARGS__>>>(in, out, n); } \
    HEAD(name)
#define T threadIdx.x

KERNEL(a_flag_that_all_lanes_set, 1, 128) {  // out[0] = 7: all store the same, in one instruction or in several
    __shared__ int flag;
    if (T < 32) flag = n - 57;
    __syncthreads();
    out[T] = flag;
}

KERNEL(neighbouring_bytes, 1, 64) {  // out[0] = 2
    __shared__ unsigned char bytes[64];
    bytes[T] = (unsigned char)in[T];
    bytes[T] += 1;
    __syncthreads();
    out[T] = bytes[T];
}

KERNEL(a_branch_that_sets_what_it_uses, 1, 64) {  // out[0] = 1
    float v, w[4];
    if (T < 32) v = in[T], w[0] = 0;
    for (int i = 1; i < 4; i++) w[i] = i;
    if (T < 32) out[T] = v + w[0];
    else out[T] = w[3];
}

KERNEL(a_vote_of_all, 1, 32) {  // out[0] = 3
    int left = T % 4, rounds = 0;
    while (__any_sync(~0u, left > 0)) {
        if (left) left--;
        rounds++;
    }
    out[T] = rounds;
}

KERNEL(a_large_local_array, 1, 2) {  // out[0] = 100001: 400 KB of local memory, of the 512 KB that a GPU has
    volatile float a[100000];
    for (int i = 0; i < 100000; i += 1000) a[i] = i;
    a[99999] = 100000;
    out[T] = a[99999] + in[0];
}

// out[0] = 3
__device__ __noinline__ float4 four(float x) { return make_float4(x, x + 1, x + 2, x + 3); }
KERNEL(a_store_of_what_a_function_returns, 1, 64) {
    __shared__ float4 s[64];
    s[T] = four(in[63 - T]);
    __syncthreads();
    out[T] = s[63 - T].z;
}

// out[0] = 1
KERNEL(a_copy_over_what_was_never_set, 1, 16) {  // `out` holds the bytes that a local has which nothing sets
    for (int i = 0; i < 16; i++) ((unsigned char*)out)[16 * T + i] = 0xfe;
    ((float4*)out)[T] = ((const float4*)in)[T];
}

KERNEL(memory_in_one_go, 1, 64) {  // out[0] = 65
    __shared__ float s[64];
    if (T == 0) {
        memset(s, 0, sizeof s);
        memcpy(s + 1, in, 63 * sizeof(float));
        memmove(s, s + 1, 63 * sizeof(float));
    }
    __syncthreads();
    out[T] = s[T] + s[63 - T] + (T == 0);
}
