// Loads of the async proxy: a box of a tensor (TMA), or bytes in a row, from global to shared memory. They count at an
// mbarrier, and land when its phase ends.
#include "mbarrier.h"

namespace simt {

void land(Block* block, const BulkCopy& load, int clock, uint32_t time) {
    std::vector<uint8_t> dense((size_t)load.bytes);  // zeros, for what lies outside of the tensor
    for_each_global(load, [&](uintptr_t from, int bytes, int offset) {
        memcpy(dense.data() + offset, (const void*)from, (size_t)bytes);
    });
    to_shared(block->worker, load, dense.data());
    if (block->launch->checked) block->worker->shadow->land_bulk(load.shared, load.bytes, clock, time);
}

static void issue(Lane* me, BulkCopy& load, Kind kind, uint32_t bar) {
    Mbarrier& mbarrier = mbarrier_at(me, bar, load.how);
    count_bulk(me, load, kind, false);
    if (me->block->launch->checked && load.bytes) {
        me->block->worker->shadow->touch(me, load.shared, load.bytes, BULK_ISSUED, load.site, load.how, nullptr);
        for_each_global(load, [&](uintptr_t from, int bytes, int) {
            Conflict none;
            global_shadow.touch(me, from, bytes, READ, 0, load.how, none, nullptr, true);
        });
    }
    add_load(me, mbarrier, bar, load);
}

extern "C" {
void simt_tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, const int* at, int rank) {
    ENTER_FROM_KERNEL(me);
    BulkCopy load = tensor_copy(me, "tma_load", map, dst, at, rank);
    issue(me, load, TMA_LOAD, bar);
}
void tma_prefetch(const CUtensorMap* map) {
    ENTER_FROM_KERNEL(me);
    check_map(me, "tma_prefetch", map);
}
void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
    ENTER_FROM_KERNEL(me);
    BulkCopy load = row_copy(me, "bulk_load", (uintptr_t)src, dst, bytes);
    issue(me, load, BULK_LOAD, bar);
}
}

}  // namespace simt
