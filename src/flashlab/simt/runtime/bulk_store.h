// Stores of the async proxy, from shared to global memory, in groups (cp.async.bulk's own, which are not cp.async's).
//
// A store reads shared memory at any time until bulk_wait_read (or bulk_wait) of its group, and has written global
// memory when bulk_wait returns. The emulator does both at the last moment.
#pragma once
#include "bulk.h"

namespace simt {

struct BulkStore {
    BulkCopy copy;
    bool add;        // a reduction
    uint32_t group;
    AsyncRead* read = nullptr;  // of shared memory, in a watched build
    bool has_read = false;
    uintptr_t low = ~(uintptr_t)0, high = 0;  // all that it writes lies in there
    std::vector<uint8_t> dense;  // what it has read
};
// The thread has ended: what it left under way is done, and told of.
void finish_stores(Lane* lane);
// global += dense, element by element. False for a type that TMA does not add.
bool reduce_add(CUtensorMapDataType type, uintptr_t global, const uint8_t* dense, int bytes);

}  // namespace simt
