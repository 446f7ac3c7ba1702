// Two ways into memory. Loads, stores, atomics and ldmatrix go through the generic proxy; TMA, bulk copies and wgmma
// through the async proxy. What one has written need not be visible to the other, even behind a barrier. Towards
// the async proxy it takes a fence_proxy_async: by the thread that wrote, after the write and before the barrier that
// orders it; or by whoever comes after that barrier, before the copy. The other way no fence is needed: waiting
// for the copy is enough.
//
// A shadow cell keeps how many such fences its writer had done. The writer's next one, if there was one, came at a
// time of its warp, and is ordered before what another thread does as any access of that time would be.
#pragma once
#include "shadow.h"

namespace simt {

void proxy_fence(Lane* lane);
// Is a write, which `lane` is ordered after, visible to an operation of the async proxy that `lane` issues now?
// fences: the low bits of how many the writer had done.
bool visible_to_async(const Lane* lane, const Stamp& write, uint16_t fences);

}  // namespace simt
