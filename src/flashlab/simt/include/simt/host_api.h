// The host side: launches, and the handful of CUDA runtime calls that a launcher makes.
#pragma once
#include "language.h"
#include <utility>

typedef struct CUstream_st* cudaStream_t;
enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidDeviceFunction = 98,
    cudaErrorIllegalAddress = 700,
    cudaErrorLaunchTimeout = 702,
    cudaErrorMisalignedAddress = 716,
    cudaErrorAssert = 710,
    cudaErrorLaunchFailure = 719,
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum cudaDeviceAttr {
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};

extern "C" {
// kernel: the function's address, which names the launch; call(closure) runs one CUDA thread of it.
void simt_launch(const char* text, const void* kernel, uint3 grid, uint3 block, size_t shared_bytes,
                 const void* stream, void (*call)(const void*), const void* closure, size_t closure_bytes,
                 int checked);
void simt_in_stream(const char* what, const void* stream);  // what the host part asks for, but for launches
int simt_last_error(int forget);
int simt_func_attribute(const void* kernel, int attribute, int value);
int simt_device_attribute(int attribute);
const char* simt_error_name(int error);
void simt_written(const void* p, size_t bytes);  // by the host, in one of the calls below
}

// A launch is wherever it was written: the runtime's caller is that line.
#define SIMT_HERE __attribute__((always_inline))

// A launch copies its arguments, converted to the kernel's parameter types, as a GPU's constant bank does.
template <class... P>
struct SimtLaunch {
    const char* text;
    void (*kernel)(P...);
    uint3 grid, block;
    size_t shared_bytes;
    const void* stream;
    SIMT_HERE void operator()(P... args) const {
        const auto closure = [f = kernel, args...] { f(args...); };
        simt_launch(
            text, (const void*)kernel, grid, block, shared_bytes, stream,
            [](const void* c) { (*(decltype(&closure))c)(); }, &closure, sizeof closure, SIMT_CHECKED);
    }
};
template <class... P>
SimtLaunch<P...> simt_configure(const char* text, void (*kernel)(P...), dim3 grid, dim3 block,
                                size_t shared_bytes = 0, const void* stream = nullptr) {
    return {text, kernel, grid, block, shared_bytes, stream};
}
// A launch whose kernel follows from the arguments (of a template, of several overloads, with default arguments):
// there is no one function to take the address of.
template <class F>
struct SimtDeducedLaunch {
    const char* text;
    F call;
    uint3 grid, block;
    size_t shared_bytes;
    const void* stream;
    template <class... A>
    SIMT_HERE void operator()(A... args) const {
        const auto closure = [f = call, args...] { f(args...); };
        simt_launch(
            text, nullptr, grid, block, shared_bytes, stream,
            [](const void* c) { (*(decltype(&closure))c)(); }, &closure, sizeof closure, SIMT_CHECKED);
    }
};
template <class F>
SimtDeducedLaunch<F> simt_configure_deduced(const char* text, F call, dim3 grid, dim3 block,
                                            size_t shared_bytes = 0, const void* stream = nullptr) {
    return {text, call, grid, block, shared_bytes, stream};
}

static inline cudaError_t cudaGetLastError() { return (cudaError_t)simt_last_error(1); }
static inline cudaError_t cudaPeekAtLastError() { return (cudaError_t)simt_last_error(0); }
static inline const char* cudaGetErrorName(cudaError_t e) { return simt_error_name(e); }
static inline const char* cudaGetErrorString(cudaError_t e) { return simt_error_name(e); }
static inline cudaError_t cudaDeviceSynchronize() { return (cudaError_t)simt_last_error(0); }
static inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return (cudaError_t)simt_last_error(0); }
static inline cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
static inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
static inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr a, int) {
    *value = simt_device_attribute(a);
    return cudaSuccess;
}
template <class K>
static inline cudaError_t cudaFuncSetAttribute(K* kernel, cudaFuncAttribute a, int value) {
    return (cudaError_t)simt_func_attribute((const void*)kernel, a, value);
}
// Always inline: the runtime's caller is the learner's line.
SIMT_INLINE cudaError_t cudaMemsetAsync(void* p, int byte, size_t n, cudaStream_t stream = nullptr) {
    simt_in_stream("cudaMemset", stream);
    memset(p, byte, n);
    simt_written(p, n);
    return cudaSuccess;
}
SIMT_INLINE cudaError_t cudaMemset(void* p, int byte, size_t n) {  // it returns at once too
    return cudaMemsetAsync(p, byte, n, nullptr);
}
static inline cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind) {
    memcpy(d, s, n);
    simt_written(d, n);
    return cudaSuccess;
}
SIMT_INLINE cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind k,
                                        cudaStream_t stream = nullptr) {
    simt_in_stream("cudaMemcpyAsync", stream);
    return cudaMemcpy(d, s, n, k);
}
template <class T>
static inline cudaError_t cudaMemcpyToSymbol(T& symbol, const void* s, size_t n, size_t offset = 0,
                                             cudaMemcpyKind = cudaMemcpyHostToDevice) {
    memcpy((char*)&symbol + offset, s, n);
    return cudaSuccess;
}
#define CUDART_INF_F __builtin_inff()
#define CUDART_NAN_F __builtin_nanf("")
