// What orders the threads of a block: who arrives at a barrier releases what is visible to its warp, and all that
// its warp has done; who passes it acquires what the others released. Barriers of all kinds go through here.
//
// Clock number w is that of warp w: it ticks when the warp releases something and goes on, so that what it does
// afterwards is not taken for released. A lane that arrives without waiting lets the other lanes of its warp arrive
// before it goes on: they share the clock. Behind the warps' clocks is one for each mbarrier: it counts the phases of
// which copies have landed, and is known to those that have waited.
#pragma once
#include "machine.h"
#include <algorithm>

namespace simt {

inline void join(uint32_t* to, const uint32_t* from, int clocks) {
    for (int c = 0; c < clocks; c++) to[c] = std::max(to[c], from[c]);
}
inline void join(Clock& to, const Clock& from, const Block* block) {
    join(to.known, from.known, block->clocks);
    if (block->fences)
        for (const Space space : {SHARED, GLOBAL}) join(to.fenced[space], from.fenced[space], block->warps);
}
inline void fences_count(Lane* me) {  // for others, from now on (proxy.h)
    for (const Space space : {SHARED, GLOBAL}) {
        auto& fences = me->proxy_fences[space];
        for (auto f = fences.rbegin(); f != fences.rend() && *f > me->warp->time; ++f) *f = me->warp->time;
        if (!fences.empty()) join(me->warp->fenced[space], me->fenced[space].data(), me->block->warps);
    }
}
inline void release(Lane* me, Clock& to) {
    const Warp* warp = me->warp;
    fences_count(me);
    join(to, *warp, warp->block);
    to.known[warp->index] = std::max(to.known[warp->index], warp->time);
}
inline void go_on_after_release(Lane* me) {
    me->warp->time++;
    let_others_run(me);
}
inline void acquire(Warp* warp, const Clock& from) { join(*warp, from, warp->block); }
// Did what a thread did at this time of its warp happen before what `lane` does now?
inline bool before(uint64_t thread, uint64_t time, const Lane* lane) {
    return thread == (uint64_t)lane->id || time <= lane->warp->known[thread / WARP];
}

}  // namespace simt
