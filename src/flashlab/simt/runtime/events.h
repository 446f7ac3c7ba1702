// What the warps of a block did, in the order in which it happened here: for a timeline. Kept for the first blocks of a
// launch, as many as its option `timeline` says; none by default.
#pragma once
#include "machine.h"

namespace simt {

// With the names that Python shows: `Event` in report.py says what the two values of each are.
#define SIMT_EVENTS(OF)                                                                                       \
    OF(WGMMA, "wgmma") OF(COMMIT, "commit") OF(WAIT_BEGIN, "wait") OF(WAIT_END, "wait-end")                   \
    OF(EXECUTE, "execute") OF(ARRIVE, "arrive") OF(MBARRIER_BEGIN, "mbarrier-wait")                           \
    OF(MBARRIER_END, "mbarrier-passed") OF(LOAD, "load") OF(STORE, "store") OF(BARRIER_BEGIN, "barrier")      \
    OF(BARRIER_END, "barrier-passed") OF(BARRIER_ARRIVE, "barrier-arrive") OF(REGISTERS, "registers")
#define SIMT_EVENT(did, name) DID_##did,
#define SIMT_EVENT_NAME(did, name) name,
enum Did : uint8_t { SIMT_EVENTS(SIMT_EVENT) };
inline const char* const DID_NAME[] = {SIMT_EVENTS(SIMT_EVENT_NAME)};

struct Event {
    uintptr_t pc;
    uint16_t warp;
    Did did;
    int64_t value[2];
};

inline void note(const Warp* warp, Did did, uintptr_t pc, int64_t first = 0, int64_t second = 0) {
    if (__builtin_expect(warp->block->events != nullptr, 0))
        warp->block->events->push_back({pc, (uint16_t)warp->index, did, {first, second}});
}

}  // namespace simt
