// Two ways into memory. Loads, stores, atomics and ldmatrix go through the generic proxy; TMA, bulk copies and wgmma
// through the async proxy. What one has written need not be visible to the other, even behind a barrier. Towards
// the async proxy it takes a fence on the way from the write to the copy (PTX ISA, "Causality order"): of the thread that
// wrote, after the write and before the barrier that orders it, as the course has it; or of whoever comes after that
// barrier, before the copy. fence_proxy_async is for shared memory, fence_proxy_async_global for global memory. The other
// way no fence is needed: waiting for the copy is enough.
//
// The shadows keep how many such fences a writer had done. The writer's next one, if there was one, came at a time of its
// warp, and is ordered before what another thread does as any access of that time would be. Of a warp's lanes in some
// order one may arrive for all: so a fence counts from the warp's next time on, or from the next barrier that its own lane comes to.
#pragma once
#include "shadow.h"

namespace simt {

inline uint16_t fences_of(const Lane* lane, Space space) { return (uint16_t)lane->proxy_fences[space].size(); }
// Is a write of the block, which `lane` is ordered after, visible to an operation of the async proxy that `lane` issues
// now? fences: the low bits (all that `mask` has) of how many the writer had done.
bool visible_to_async(const Lane* lane, Space space, uint32_t thread, uint64_t time, uint16_t fences,
                      uint16_t mask = 0xffff);

}  // namespace simt
