// The box of a tensor map: which bytes of the tensor, and which of shared memory.
//
// In shared memory the box is dense, dimension 0 innermost. A swizzle then permutes the 16-byte chunks of each row
// of 32, 64 or 128 bytes: by the address itself, whose bits 4 to 6 are xored with bits 7 to 9 (128B), 4 and 5 with 7
// and 8 (64B), 4 with 7 (32B).
#pragma once
#include "../include/simt/ptx_sm90_emulated.h"
#include <algorithm>

namespace simt {

inline uint32_t swizzled(uint32_t address, int swizzle) {
    const uint32_t bits = swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 7
                          : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 3
                          : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 1
                                                                 : 0;
    return address ^ (address >> 7 & bits) << 4;
}
// With an element stride, the box spans `box` elements and takes every so manieth of them.
inline int box_elements(const CUtensorMap& map, int d) {
    return (map.box[d] + map.element_strides[d] - 1) / map.element_strides[d];
}
inline int box_bytes(const CUtensorMap& map) {
    int bytes = map.item;
    for (int d = 0; d < map.rank; d++) bytes *= box_elements(map, d);
    return bytes;
}

struct BoxRow {      // the box along dimension 0
    uint32_t shared;  // its place in the dense box, in bytes
    int bytes;
    uintptr_t global;   // of its first byte that lies in the tensor
    int first, inside;  // that byte's place in the row; how many lie in the tensor
};
// Calls f(row) for each row of the box whose corner is at these coordinates.
template <class F>
void for_each_row(const CUtensorMap& map, const int* at, F f) {
    int n[5] = {1, 1, 1, 1, 1}, i[5] = {};
    for (int d = 0; d < map.rank; d++) n[d] = box_elements(map, d);
    const int64_t low = std::max<int64_t>(0, at[0]);
    const int64_t high = std::min<int64_t>((int64_t)map.dims[0], (int64_t)at[0] + n[0]);
    BoxRow row{};
    row.bytes = n[0] * map.item;
    for (;; row.shared += (uint32_t)row.bytes) {
        bool in = high > low;
        row.global = map.base + (uint64_t)low * map.item;
        for (int d = 1; d < map.rank; d++) {
            const int64_t c = (int64_t)at[d] + (int64_t)i[d] * map.element_strides[d];
            in &= c >= 0 && c < (int64_t)map.dims[d];
            row.global += (uint64_t)c * map.strides[d - 1];
        }
        row.first = in ? (int)(low - at[0]) * map.item : 0;
        row.inside = in ? (int)(high - low) * map.item : 0;
        f((const BoxRow&)row);
        int d = 1;
        while (d < map.rank && ++i[d] == n[d]) i[d++] = 0;
        if (d >= map.rank) return;
    }
}

}  // namespace simt
