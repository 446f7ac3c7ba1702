// What the warps of a block did, in the order in which it happened here: for a timeline. Kept for the first blocks of a
// launch, as many as its option `timeline` says; none by default.
#pragma once
#include "machine.h"

namespace simt {

// The names are those that Python shows; what the two values are stands beside them.
enum Did : uint8_t {
    DID_WGMMA,          // issued it: its number in the warpgroup (from 1), N
    DID_COMMIT,         // closed a group: the number of the last wgmma in it, of the group
    DID_WAIT_BEGIN,     // wgmma_wait: the number of the last wgmma that it waits for (0: none), groups it leaves under way
    DID_WAIT_END,       //
    DID_EXECUTE,        // a wgmma was computed: its number, N
    DID_ARRIVE,         // at an mbarrier: its address, bytes that it expects
    DID_MBARRIER_BEGIN, // began to wait: the mbarrier's address, the parity
    DID_MBARRIER_END,   //
    DID_LOAD,           // issued a TMA or bulk load: where to, bytes
    DID_STORE,          // issued a TMA or bulk store: where from, bytes
    DID_BARRIER_BEGIN,  // came to __syncthreads or bar.sync: its id, threads
    DID_BARRIER_END,    //
    DID_BARRIER_ARRIVE, // bar.arrive: its id, threads
    DID_REGISTERS,      // setmaxnreg: registers per thread
    DIDS
};
inline const char* const DID_NAME[DIDS] = {
    "wgmma", "commit", "wait", "wait-end", "execute", "arrive", "mbarrier-wait", "mbarrier-passed", "load", "store",
    "barrier", "barrier-passed", "barrier-arrive", "registers"};

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
