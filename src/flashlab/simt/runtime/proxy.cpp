// fence.proxy.async: see proxy.h.
#include "proxy.h"
#include "clocks.h"

namespace simt {

bool visible_to_async(const Lane* lane, Space space, uint32_t thread, uint64_t time, uint16_t fences, uint16_t mask) {
    const auto& own = lane->fenced[space];
    if (time <= std::max(lane->warp->fenced[space][thread / WARP], own.empty() ? 0 : own[thread / WARP])) return true;
    const auto& of_writer = lane->block->lane[thread].proxy_fences[space];
    const uint16_t since = (uint16_t)(of_writer.size() - fences) & mask;
    if (!since) return false;
    return before(thread, of_writer[of_writer.size() - since], lane);
}

extern "C" void simt_fence_proxy_async(int global) {
    ENTER_FROM_KERNEL(me);
    if (!me->block->launch->checked) return;
    const Space space = global ? GLOBAL : SHARED;
    me->warp->loading.clear();
    me->proxy_fences[space].push_back(me->warp->time + 1);  // or before (clocks.h)
    me->block->fences = true;
    me->block->global_fences |= space == GLOBAL;
    me->fenced[space].resize(me->block->warps);
    join(me->fenced[space].data(), me->warp->known, me->block->warps);
}

}  // namespace simt
