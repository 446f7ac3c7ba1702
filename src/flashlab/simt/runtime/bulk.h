// What the copies of the async proxy have in common: TMA, with a tensor map, and bulk copies, of bytes in a row.
#pragma once
#include "tensor_box.h"
#include "global_shadow.h"

namespace simt {

// A copy as it was asked for.
struct BulkCopy {
    const char* how;     // "tma_load" ...
    bool tensor;         // with a map and the corner of a box; else bytes in a row
    CUtensorMap map;
    int at[5];
    uint32_t shared;     // address
    uintptr_t global;    // address, of bytes in a row
    int bytes;           // of shared memory
    int thread, site;    // that asked
};

// Checks what was asked for: the map, alignments, bounds of shared memory. What is wrong is filed, and ends the launch.
BulkCopy tensor_copy(Lane* me, const char* how, const CUtensorMap* map, uint32_t shared, const int* at, int rank);
// A tensor map is a kernel parameter, or lies in constant or global memory: no copy of one is. What is wrong is filed.
void check_map(Lane* me, const char* how, const CUtensorMap* map);
BulkCopy row_copy(Lane* me, const char* how, uintptr_t global, uint32_t shared, uint32_t bytes);
// Counts it, and checks the bounds of global memory.
void count_bulk(Lane* me, BulkCopy& copy, Kind kind, bool write);

// Calls f(address, bytes, offset) for all of the copy's bytes of global memory; `offset` is where they lie in the copy
// before any swizzle.
template <class F>
void for_each_global(const BulkCopy& copy, F f) {
    if (!copy.tensor) return f(copy.global, copy.bytes, 0);
    for_each_row(copy.map, copy.at, [&](const BoxRow& row) {
        if (row.inside) f(row.global, row.inside, (int)row.shared + row.first);
    });
}
// Moves the bytes between shared memory and `dense`, which has them without the swizzle.
void to_shared(const Worker* worker, const BulkCopy& copy, const uint8_t* dense);
void from_shared(const Worker* worker, const BulkCopy& copy, uint8_t* dense);

}  // namespace simt
