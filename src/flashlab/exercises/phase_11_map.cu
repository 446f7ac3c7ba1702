// Exercise 11.9: the learner's tensor map, and its numbers as the emulator keeps them.

#include "p11_hopper/tiles.cuh"

// region: map
CUtensorMap map_of_k(const T* qkv, int batch, int seq, int heads);
// endregion

//   out [15]: bytes between qkv and where the map begins, 4 dims, 3 strides, 4 of the box; rank, type, swizzle
extern "C" int k_map(const T* qkv, int64_t* out, int batch, int seq, int heads, void* stream) {
    const CUtensorMap map = map_of_k(qkv, batch, seq, heads);
    *out++ = (int64_t)map.base - (int64_t)qkv;
    for (int i = 0; i < 4; i++) *out++ = map.dims[i];
    for (int i = 0; i < 3; i++) *out++ = map.strides[i];
    for (int i = 0; i < 4; i++) *out++ = map.box[i];
    *out++ = map.rank, *out++ = map.type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    *out++ = map.swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
    return 0;
}
