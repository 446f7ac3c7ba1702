// Stores of the async proxy: see bulk_store.h.
#include "bulk_store.h"
#include "values.h"

namespace simt {

static void read_shared(Lane* me, BulkStore& store, const Lane* by) {
    if (store.has_read) return;
    store.has_read = true;
    store.dense.resize((size_t)store.copy.bytes);
    from_shared(me->block->worker, store.copy, store.dense.data());
    if (store.read) me->block->worker->shadow->end_read(store.read, by);
}
static void write_global(Lane* me, BulkStore& store) {
    const uintptr_t pc = me->pc;
    me->pc = (*me->block->worker->sites)[store.copy.site].pc;
    auto& writing = me->block->writing;
    writing.erase(std::remove(writing.begin(), writing.end(), &store), writing.end());
    for_each_global(store.copy, [&](uintptr_t to, int bytes, int offset) {
        Conflict conflict;
        const Access access = store.add ? ATOMIC : WRITE;
        if (me->block->launch->checked &&
            global_shadow.touch(me, to, bytes, access, 0, store.copy.how, conflict, nullptr, true))
            file_conflict(me, conflict, me->pc, false);
        if (store.add) reduce_add((CUtensorMapDataType)store.copy.map.type, to, store.dense.data() + offset, bytes);
        else memcpy((void*)to, store.dense.data() + offset, (size_t)bytes);
    });
    me->pc = pc;
}
// What a store reads. Of a row of the box that ends behind the tensor's that is not all: what would be written beyond the
// end may never have been written here either.
static std::vector<std::pair<uint32_t, uint32_t>> ranges_of(const BulkCopy& copy) {
    const int row = copy.tensor ? copy.map.box[0] * copy.map.item : 0;
    const int64_t there = copy.tensor ? ((int64_t)copy.map.dims[0] - copy.at[0]) * copy.map.item : 0;
    if (there >= row) return {{copy.shared, (uint32_t)copy.bytes}};
    std::vector<std::pair<uint32_t, uint32_t>> found;
    for (int offset = 0; offset < copy.bytes; offset += 16)
        if (offset % row < there) found.push_back({swizzled(copy.shared + (uint32_t)offset, copy.map.swizzle), 16});
    return found;
}
static void issue(Lane* me, const BulkCopy& asked, Kind kind) {
    auto store = std::make_shared<BulkStore>();
    store->copy = asked;
    store->add = kind == TMA_REDUCE;
    store->group = me->bulk_group;
    count_bulk(me, store->copy, kind, true);
    if (!asked.bytes) return;
    if (me->block->launch->checked) {
        store->read =
            me->block->worker->shadow->begin_read(me, {asked.how, me->id, store->copy.site, ranges_of(asked)});
        bool told = false;
        for_each_global(asked, [&](uintptr_t to, int bytes, int) {
            told = told || global_shadow.in_flight(me, to, bytes, true, store->add, asked.how);
            store->low = std::min(store->low, to), store->high = std::max(store->high, to + (uintptr_t)bytes);
        });
        me->block->writing.push_back(store.get());
    }
    me->stores.push_back(store);
}
void finish_stores(Lane* lane) {
    for (auto& store : lane->stores) {
        if (!store->has_read) {
            // 1: not even committed
            file(lane, {"never-waited",
                        store->copy.how,
                        "",
                        {store->group == lane->bulk_group},
                        (*lane->block->worker->sites)[store->copy.site].pc});
        }
        read_shared(lane, *store, nullptr);
        write_global(lane, *store);
    }
    lane->stores.clear();
}

extern "C" {
void simt_tma_store(const CUtensorMap* map, uint32_t src, const int* at, int rank, int add) {
    ENTER_FROM_KERNEL(me);
    BulkCopy copy = tensor_copy(me, add ? "tma_reduce_add" : "tma_store", map, src, at, rank);
    for (int d = 0; d < rank; d++)  // an H200 stops with "illegal instruction" (tests/simt/hopper_probe.py)
        if (at[d] < 0) file_fatal(me, {"store-corner", copy.how, "", {at[d], d}}, cudaErrorIllegalAddress);
    if (add && !reduce_add((CUtensorMapDataType)map->type, 0, nullptr, 0)) file_fatal(me, {"reduce-type", copy.how});
    // An H200 writes pieces of 16 bytes whole: behind a row that ends within one too.
    if (!add) copy.map.dims[0] = (copy.map.dims[0] * map->item + 15) / 16 * 16 / map->item;
    issue(me, copy, add ? TMA_REDUCE : TMA_STORE);
}
void bulk_store(void* dst, uint32_t src, uint32_t bytes) {
    ENTER_FROM_KERNEL(me);
    issue(me, row_copy(me, "bulk_store", (uintptr_t)dst, src, bytes), BULK_STORE);
}
void bulk_commit() { kernel_lane(CALLER)->bulk_group++; }
void simt_bulk_wait(int groups_left, int read) {
    ENTER_FROM_KERNEL(me);
    size_t done = 0;
    for (; done < me->stores.size(); done++) {
        BulkStore& store = *me->stores[done];
        if (store.group + (uint32_t)groups_left >= me->bulk_group) break;
        read_shared(me, store, me);
        if (!read) write_global(me, store);
    }
    if (!read) me->stores.erase(me->stores.begin(), me->stores.begin() + (long)done);
}
}

}  // namespace simt
