// fence.proxy.async: see proxy.h.
#include "proxy.h"
#include "clocks.h"

namespace simt {

void proxy_fence(Lane* lane) {
    lane->proxy_fences.push_back(lane->warp->time);
    lane->fences++;
    lane->block->fences = true;
    join(lane->warp->fenced, lane->warp->known, lane->block->warps);
}

bool visible_to_async(const Lane* lane, const Stamp& write, uint16_t fences) {
    if (write.time <= lane->warp->fenced[write.thread / WARP]) return true;
    const auto& of_writer = lane->block->lane[write.thread].proxy_fences;
    const uint16_t since = (uint16_t)(of_writer.size() - fences);
    if (!since) return false;
    return before(write.thread, of_writer[of_writer.size() - since], lane);
}

extern "C" void simt_fence_proxy_async() {
    Lane* me = kernel_lane(CALLER);
    Inside inside(me, CALLER);
    if (me->block->launch->checked) proxy_fence(me);
}

}  // namespace simt
