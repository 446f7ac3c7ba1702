// Copies of the async proxy: see bulk.h.
#include "bulk.h"
#include "events.h"

namespace simt {

[[noreturn]] static void misaligned(Lane* me, const char* how, const char* what, int64_t beyond, int64_t multiple,
                                    uint32_t shared = 0) {
    file_fatal(me, {"bulk-misaligned", how, what, {beyond, multiple, shared}}, cudaErrorMisalignedAddress);
}
static void check_shared(Lane* me, const BulkCopy& copy, int multiple) {
    if (copy.shared % multiple) misaligned(me, copy.how, "shared", copy.shared % multiple, multiple, copy.shared);
    if (!me->block->worker->shadow->in_bounds(me, copy.shared, copy.bytes, copy.how))
        end_launch(me, cudaErrorIllegalAddress);
}

void check_map(Lane* me, const char* how, const CUtensorMap* map) {
    const SharedWindow& window = me->block->worker->window;
    const bool local = (uintptr_t)map - stacks_low < stacks_bytes;
    if (!local && (uintptr_t)map - window.low >= window.high - window.low) return;
    file_fatal(me, {"tensor-map", how, local ? "local" : "shared"}, cudaErrorIllegalAddress);
}
BulkCopy tensor_copy(Lane* me, const char* how, const CUtensorMap* map, uint32_t shared, const int* at, int rank) {
    check_map(me, how, map);
    if ((uintptr_t)map % 64) misaligned(me, how, "map", (uintptr_t)map % 64, 64);
    if (map->magic != SIMT_TENSOR_MAP || map->rank != rank)
        file_fatal(me, {"tensor-map", how, "", {map->magic == SIMT_TENSOR_MAP ? map->rank : 0, rank}},
                   cudaErrorIllegalAddress);
    BulkCopy copy{how, true, *map, {}, shared, 0, box_bytes(*map), me->id, -1};
    for (int d = 0; d < rank; d++) copy.at[d] = at[d];
    // An H200 stops with "illegal instruction" (tests/simt/hopper_probe.py); the PTX manual does not say it.
    if (const int64_t beyond = (int64_t)at[0] * map->item & 15) misaligned(me, how, "corner", beyond, 16);
    check_shared(me, copy, 128);
    return copy;
}
BulkCopy row_copy(Lane* me, const char* how, uintptr_t global, uint32_t shared, uint32_t bytes) {
    BulkCopy copy{how, false, {}, {}, shared, global, (int)bytes, me->id, -1};
    if (bytes % 16) misaligned(me, how, "bytes", bytes, 16);
    if (bytes > MAX_SHARED)
        file_fatal(me, {"bulk-size", how, "", {bytes, (int64_t)MAX_SHARED}}, cudaErrorIllegalAddress);
    if (global % 16) misaligned(me, how, "global", (int64_t)(global % 16), 16);
    if (bytes) check_shared(me, copy, 16);
    return copy;
}

void count_bulk(Lane* me, BulkCopy& copy, Kind kind, bool write) {
    Sites& sites = *me->block->worker->sites;
    copy.site = sites.find(me->pc, kind);
    uint64_t moved = 0;
    if (copy.bytes)
        for_each_global(copy, [&](uintptr_t address, int bytes, int) {
            check_global(me, address, bytes, write, copy.how);
            moved += (uint64_t)bytes;
        });
    note(me->warp, write ? DID_STORE : DID_LOAD, me->pc, copy.shared, copy.bytes);
    Site& site = sites[copy.site];
    site.count[0]++, site.count[1] += (uint64_t)copy.bytes, site.count[2] += moved;
}

template <class F>
static void for_each_chunk(const Worker* worker, const BulkCopy& copy, F f) {
    const int swizzle = copy.tensor ? copy.map.swizzle : 0;
    for (int offset = 0; offset < copy.bytes; offset += 16)
        f((uint8_t*)worker->window.base + swizzled(copy.shared + (uint32_t)offset, swizzle), offset);
}
void to_shared(const Worker* worker, const BulkCopy& copy, const uint8_t* dense) {
    for_each_chunk(worker, copy, [&](uint8_t* shared, int offset) { memcpy(shared, dense + offset, 16); });
}
void from_shared(const Worker* worker, const BulkCopy& copy, uint8_t* dense) {
    for_each_chunk(worker, copy, [&](const uint8_t* shared, int offset) { memcpy(dense + offset, shared, 16); });
}

}  // namespace simt
