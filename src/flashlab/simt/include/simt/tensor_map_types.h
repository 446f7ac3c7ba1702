// The tensor map of CUDA's driver (<cuda.h>), as far as the course uses it: a tiled map of one to five dimensions.
#pragma once
#include "language.h"

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };

enum CUtensorMapDataType {
    CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0,
    CU_TENSOR_MAP_DATA_TYPE_UINT16,
    CU_TENSOR_MAP_DATA_TYPE_UINT32,
    CU_TENSOR_MAP_DATA_TYPE_INT32,
    CU_TENSOR_MAP_DATA_TYPE_UINT64,
    CU_TENSOR_MAP_DATA_TYPE_INT64,
    CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    CU_TENSOR_MAP_DATA_TYPE_FLOAT64,
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
};
enum CUtensorMapSwizzle {
    CU_TENSOR_MAP_SWIZZLE_NONE = 0,
    CU_TENSOR_MAP_SWIZZLE_32B,
    CU_TENSOR_MAP_SWIZZLE_64B,
    CU_TENSOR_MAP_SWIZZLE_128B,
};

// 128 opaque bytes. The emulator's own encoding is here; a GPU's is another.
struct alignas(64) CUtensorMap {
    uint64_t magic;       // what tells a map from other bytes
    uint64_t base;        // address of the tensor's first element
    uint64_t dims[5];     // elements
    uint64_t strides[4];  // bytes, of dimensions 1, 2 ...
    uint16_t box[5];      // elements that the box spans
    uint8_t element_strides[5];
    uint8_t type, item, rank, swizzle;  // item: bytes of an element
};
static_assert(sizeof(CUtensorMap) == 128, "a tensor map has 128 bytes");
constexpr uint64_t SIMT_TENSOR_MAP = 0x70616d726f736e74;
