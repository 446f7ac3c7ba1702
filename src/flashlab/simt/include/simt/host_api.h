// The host side: launches, and the handful of CUDA runtime calls that a launcher makes.
#pragma once
#include "language.h"
#include <utility>

typedef struct CUstream_st* cudaStream_t;
#define SIMT_ERRORS(OF) \
    OF(cudaSuccess, 0) OF(cudaErrorInvalidValue, 1) OF(cudaErrorMemoryAllocation, 2) \
    OF(cudaErrorInvalidConfiguration, 9) OF(cudaErrorInvalidDeviceFunction, 98) OF(cudaErrorIllegalAddress, 700) \
    OF(cudaErrorLaunchTimeout, 702) OF(cudaErrorAssert, 710) OF(cudaErrorMisalignedAddress, 716) \
    OF(cudaErrorLaunchFailure, 719) OF(cudaErrorInvalidClusterSize, 912)
#define SIMT_ERROR(name, number) name = number,
enum cudaError_t { SIMT_ERRORS(SIMT_ERROR) };
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9,
    cudaFuncAttributeNonPortableClusterSizeAllowed = 14
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
void simt_launch(const char* text, const void* kernel, uint3 grid, uint3 block, size_t shared_bytes, const void* stream,
                 void (*call)(const void*), const void* closure, size_t closure_bytes, int checked,
                 uint3 cluster);
void simt_in_stream(const char* what, const void* stream);  // what the host part asks for, but for launches
int simt_last_error(int forget);
int simt_func_attribute(const void* kernel, int attribute, int value);
int simt_device_attribute(int attribute);
int simt_active_clusters(unsigned blocks, size_t shared_bytes);
const char* simt_error_name(int error);
void simt_written(const void* p, size_t bytes);  // by the host, in one of the calls below
}

// A launch is wherever it was written: the runtime's caller is that line.
#define SIMT_HERE __attribute__((always_inline))

struct SimtConfiguration {
    const char* text;
    const void* kernel;
    uint3 grid, block;
    size_t shared_bytes;
    const void* stream;
    uint3 cluster = {1, 1, 1};  // blocks
};
// A launch copies its arguments, as a GPU's constant bank does.
template <class F, class... A>
SIMT_HERE inline void simt_start(const SimtConfiguration& c, F call, A... args) {
    const auto closure = [call, args...] { call(args...); };
    simt_launch(
        c.text, c.kernel, c.grid, c.block, c.shared_bytes, c.stream,
        [](const void* of) { (*(decltype(&closure))of)(); }, &closure, sizeof closure, SIMT_CHECKED,
        c.cluster);
}
template <class... P>
struct SimtLaunch {
    SimtConfiguration configuration;
    void (*kernel)(P...);
    SIMT_HERE void operator()(P... args) const { simt_start(configuration, kernel, args...); }  // of the kernel's types
};
template <class... P>
SimtLaunch<P...> simt_configure(const char* text, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes = 0,
                                const void* stream = nullptr) {
    return {{text, (const void*)kernel, grid, block, shared_bytes, stream}, kernel};
}
// A launch whose kernel follows from the arguments (of a template, of several overloads, with default arguments):
// there is no one function to take the address of.
template <class F>
struct SimtDeducedLaunch {
    SimtConfiguration configuration;
    F call;
    template <class... A>
    SIMT_HERE void operator()(A... args) const {
        simt_start(configuration, call, args...);
    }
};
template <class F>
SimtDeducedLaunch<F> simt_configure_deduced(const char* text, F call, dim3 grid, dim3 block, size_t shared_bytes = 0,
                                            const void* stream = nullptr) {
    return {{text, nullptr, grid, block, shared_bytes, stream}, call};
}

// A launch with attributes: of these there is the cluster's size.
enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension = 4 };
union cudaLaunchAttributeValue {
    uint3 clusterDim;
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs;
};
inline uint3 simt_cluster_of(const cudaLaunchConfig_t* c) {
    return c->numAttrs ? c->attrs[c->numAttrs - 1].val.clusterDim : uint3{1, 1, 1};
}
template <class... P, class... A>
SIMT_HERE inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* c, void (*kernel)(P...), A&&... args) {
    SimtLaunch<P...>{{"the kernel", (const void*)kernel, c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream,
                      simt_cluster_of(c)},
                     kernel}(std::forward<A>(args)...);
    return (cudaError_t)simt_last_error(0);
}
template <class K>
static inline cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, K*, const cudaLaunchConfig_t* c) {
    *clusters = simt_active_clusters(simt_cluster_of(c).x, c->dynamicSmemBytes);
    return cudaSuccess;
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
