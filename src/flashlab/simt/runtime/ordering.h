// What orders threads of different blocks. Nothing does, but for this: a thread that has passed a
// __threadfence() publishes with an atomic (or a volatile store) all that was visible to it at the fence, and
// a thread whose atomic (or volatile load) comes to the same word later sees it. What one thread of a block
// has learnt counts for the block.
#pragma once
#include "machine.h"
#include <memory>

namespace simt {

// An access as the shadow of global memory keeps it.
struct GlobalStamp {
    uint32_t block = 0, pc = 0;  // pc relative to the module; 0: no such access
    uint32_t time : 22, thread : 10;
    uint8_t bytes = 0;  // which of the cell's two
    uint8_t atomic = 0, execution = 0;
    uint8_t published = 0;  // how often its block had
};

void fence(Lane* lane);  // __threadfence()
// The lane's atomic access to this word: what was published there becomes known to its block, and what its
// last fence covers is published. A volatile load only learns, a volatile store only publishes.
void meet(Lane* lane, uintptr_t address, bool learn, bool publish);
// Is an access of another block known to the lane's block?
bool known(const Lane* lane, const GlobalStamp& s);
void forget_order();  // a launch begins

}  // namespace simt
