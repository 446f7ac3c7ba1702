// tensor_map.cuh - host: describes a tensor, and the box of it that one TMA copy moves (ptx_sm90.cuh).
//
// The map goes to the kernel by value, as a parameter `const __grid_constant__ CUtensorMap map`. On a GPU the driver
// encodes it; it is asked for its function at run time, so that nothing more has to be linked.
#pragma once
#include "simt/names.h"
#include "simt.h"
#include <cuda.h>
#include <stdint.h>
#include <stdio.h>
#include <stdexcept>
#include <string>
#ifdef __CUDACC__
#include <cuda_runtime.h>
#endif

// Bytes of one element; 0 for a type that the course does not use.
inline int tensor_map_item(CUtensorMapDataType type) {
    switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: return 4;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return 8;
    default: return 0;
    }
}
// The bytes within which a swizzle permutes 16-byte chunks; 0: none, or one that the course does not use.
inline int tensor_map_span(CUtensorMapSwizzle swizzle) {
    return swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32
           : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
           : swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128 : 0;
}

// Throws std::invalid_argument with the rule of cuTensorMapEncodeTiled that these arguments break, if they break one.
inline void tensor_map_check(const void* base, CUtensorMapDataType type, int rank, const uint64_t* dims,
                             const uint64_t* strides_bytes, const uint32_t* box, CUtensorMapSwizzle swizzle,
                             const uint32_t* element_strides) {
    // One call writes all sentences: each concatenation of strings would be a hundred instructions in every module.
    auto refuse = [](const char* format, uint64_t a = 0, uint64_t b = 0) {
        char text[200];
        const int n = snprintf(text, sizeof text, "the tensor map is refused: ");
        snprintf(text + n, sizeof text - n, format, (unsigned long long)a, (unsigned long long)b);
        throw std::invalid_argument(text);
    };
    const int item = tensor_map_item(type), span = tensor_map_span(swizzle);
    if (!item) refuse("its data type %llu is none of UINT8 to INT64, FLOAT16, BFLOAT16, FLOAT32 or 64", type);
    if (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && !span) refuse("its swizzle %llu is none of NONE, 32B, 64B, 128B", swizzle);
    if (rank < 1 || rank > 5) refuse("its rank is %lld; a tensor has 1 to 5 dimensions", (int64_t)rank);
    if (!base) refuse("its base is a null pointer");
    if ((uintptr_t)base % 16) refuse("its base is %llu bytes beyond a multiple of 16", (uintptr_t)base % 16);
    for (int i = 0; i < rank; i++) {
        if (!dims[i] || dims[i] > 1ull << 32)
            refuse("the size of dimension %llu is %llu; it is 1 to 2^32 elements", i, dims[i]);
        if (!box[i] || box[i] > 256) refuse("the box of dimension %llu is %llu; it is 1 to 256 elements", i, box[i]);
        if (element_strides && (!element_strides[i] || element_strides[i] > 8))
            refuse("the element stride of dimension %llu is %llu; it is 1 to 8", i, element_strides[i]);
        if (i && strides_bytes[i - 1] % 16)
            refuse("the stride of dimension %llu is %llu bytes; it has to be a multiple of 16", i, strides_bytes[i - 1]);
        if (i && strides_bytes[i - 1] >= 1ull << 40)
            refuse("the stride of dimension %llu is %llu bytes; it has to be less than 2^40", i, strides_bytes[i - 1]);
    }
    const uint64_t inner = (uint64_t)box[0] * item;
    if (inner % 16) refuse("the box is %llu bytes wide in dimension 0; that has to be a multiple of 16", inner);
    // cuTensorMapEncodeTiled takes narrower ones too; the course has no use for them.
    if (span && inner != (uint64_t)span)
        refuse("the box is %llu bytes wide in dimension 0; with a %llu-byte swizzle it has to be as wide as that", inner,
               span);
}

// region: tensor_map
// base: element 0; `dims` (elements), `box` (elements that it spans) and `element_strides` (all 1 where null) count
// dimensions from the innermost one; `strides_bytes`, rank - 1 of them, begin with dimension 1's: the innermost
// dimension has no gaps.
// Throws std::invalid_argument, with the rule that the arguments break.
inline CUtensorMap tensor_map(const void* base, CUtensorMapDataType type, int rank, const uint64_t* dims,
                              const uint64_t* strides_bytes, const uint32_t* box, CUtensorMapSwizzle swizzle,
                              const uint32_t* element_strides = nullptr) {
    // endregion
    tensor_map_check(base, type, rank, dims, strides_bytes, box, swizzle, element_strides);
    CUtensorMap map{};
#ifdef __CUDACC__
    static const uint32_t ones[5] = {1, 1, 1, 1, 1};
    const cuuint64_t* sizes = (const cuuint64_t*)dims;  // both are 64-bit integers
    const cuuint64_t* strides = (const cuuint64_t*)strides_bytes;
    static const auto encode = [] {  // asked for once: the search takes as long as a short kernel
        void* address = nullptr;
        cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault, &found) ||
            found != cudaDriverEntryPointSuccess)
            throw std::runtime_error("the driver has no cuTensorMapEncodeTiled");
        return (decltype(&cuTensorMapEncodeTiled))address;
    }();
    const CUresult result = encode(
        &map, type, (cuuint32_t)rank, const_cast<void*>(base), sizes, strides, box,
        element_strides ? element_strides : ones,
        CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        throw std::invalid_argument("the driver refuses the tensor map: error " + std::to_string((int)result));
#else
    map.magic = SIMT_TENSOR_MAP, map.base = (uint64_t)(uintptr_t)base;
    map.type = (uint8_t)type, map.item = (uint8_t)tensor_map_item(type);
    map.rank = (uint8_t)rank, map.swizzle = (uint8_t)swizzle;
    for (int i = 0; i < rank; i++) {
        map.dims[i] = dims[i], map.box[i] = (uint16_t)box[i];
        if (i) map.strides[i - 1] = strides_bytes[i - 1];
        // TMA takes every element of dimension 0, whatever its stride says.
        map.element_strides[i] = (uint8_t)(element_strides && i ? element_strides[i] : 1);
    }
#endif
    return map;
}
#include "simt/names_end.h"
