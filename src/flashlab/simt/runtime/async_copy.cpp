// cp.async: a copy from global to shared memory that goes on while the thread computes.
//
// The hardware may deliver the bytes at any moment between the instruction and the wait for its group. The
// emulator takes the last moment allowed: what reads too early then reads what was there before, every time.
#include "global_shadow.h"

namespace simt {

static void land(Lane* me, const Copy& copy) {
    Worker* worker = me->block->worker;
    uint8_t* to = (uint8_t*)worker->window.base + copy.dst;
    memcpy(to, copy.src, copy.src_bytes);
    memset(to + copy.src_bytes, 0, copy.bytes - copy.src_bytes);
    if (me->block->launch->checked) worker->shadow->land(me, copy.dst, copy.bytes, copy.site);
}

extern "C" void simt_cp_async(uint32_t dst, const void* src, int bytes, int src_bytes) {
    ENTER_FROM_KERNEL(me);
    Worker* worker = me->block->worker;
    const int64_t off = dst % bytes ? dst : (uintptr_t)src % bytes ? (int64_t)((uintptr_t)src % 256) : 0;
    if (off)
        file_fatal(me, {"misaligned", "cp.async", dst % bytes ? "shared" : "global", {off, bytes}},
                   cudaErrorMisalignedAddress);
    if (src_bytes < 0 || src_bytes > bytes) file_fatal(me, {"copy-size", "cp.async", "", {src_bytes, bytes}});
    const int site = worker->sites->find(me->pc, CP_ASYNC);
    const bool ok = worker->shadow->in_bounds(me, dst, bytes, "cp.async");
    if (ok && me->block->launch->checked) worker->shadow->touch(me, dst, bytes, COPY_ISSUED, site, "cp.async", nullptr);
    if (src_bytes) {
        check_global(me, (uintptr_t)src, src_bytes, false, "cp.async");
        Conflict none;
        if (me->block->launch->checked) global_shadow.touch(me, (uintptr_t)src, src_bytes, READ, 0, "cp.async", none);
    }
    count_access(me, site, src_bytes ? (uintptr_t)src | (uint64_t)((dst - dynamic_shift) / 128) << 48 : NO_ADDRESS,
                 bytes);
    if (ok) me->copies.push_back({dst, (const char*)src, bytes, src_bytes, site, me->group});
}
extern "C" void cp_async_commit() { kernel_lane(CALLER)->group++; }
extern "C" void simt_cp_async_wait(int groups_left) {
    ENTER_FROM_KERNEL(me);
    if (groups_left < 0) me->group++, groups_left = 0;
    while (me->first_copy < me->copies.size() && me->copies[me->first_copy].group + (uint32_t)groups_left < me->group)
        land(me, me->copies[me->first_copy++]);
    if (me->first_copy == me->copies.size()) me->copies.clear(), me->first_copy = 0;
}

}  // namespace simt
