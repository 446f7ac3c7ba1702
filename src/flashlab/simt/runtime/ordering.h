// What orders threads of different blocks. Nothing does, but for this: a thread that has passed a
// __threadfence() publishes with an atomic (or a volatile store) all that was visible to it at the fence, and what
// was to others at fences of theirs, if a barrier stands between: the fences are sequentially consistent. A
// thread whose atomic (or volatile load) comes to the same word later looks at it, and acquires it with a
// __threadfence() of its own. The barriers of its block hand that on to the other threads.
#pragma once
#include "machine.h"

namespace simt {

// An access as the shadow of global memory keeps it.
struct GlobalStamp {
    uint32_t block = 0, pc = 0;  // pc relative to the module; 0: no such access
    uint32_t time : 22, thread : 10;
    uint16_t bytes : 4;   // which of the cell's
    uint16_t atomic : 1;
    uint16_t async : 1;   // of the async proxy
    uint16_t update : 1;  // a store of what a volatile load has read there
    uint16_t loose : 1;   // a volatile store
    uint16_t fences : 8;  // how many fence_proxy_async_global its thread had done, the lowest bits (proxy.h)
    uint8_t execution = 0;
    uint8_t published = 0;  // how often its block had
    GlobalStamp() : time(0), thread(0), bytes(0), atomic(0), async(0), update(0), loose(0), fences(0) {}
};

void fence(Lane* lane);  // __threadfence()
// By whom: the lane, or one that it is ordered after, with a fence behind the look or without; or any of its block.
enum Knowledge { ACQUIRED, LOOKED, BY_BLOCK };
// The lane's atomic access to this word: what was published there becomes known to its block, and what its
// last fence covers is published. A volatile load only learns, a volatile store only publishes.
void meet(Lane* lane, uintptr_t address, bool learn, bool publish);
// Is an access of another block known to the lane? fenced: with a fence_proxy_async_global on the way.
bool known(const Lane* lane, const GlobalStamp& s, Knowledge how, bool fenced = false);
// Up to which number the lane's block knows what was published at this word.
uint32_t known_of_word(const Lane* lane, uintptr_t address);
// Is it an access to this word that published, with a number up to that?
bool published_by(const GlobalStamp& s, uintptr_t address, uint32_t known);
// Before an access that publishes there: those of other blocks that watch this word look at it once.
void let_others_look(Lane* lane, uintptr_t address);
// Before the store of an update whose fence may stand behind a turn: the first at a word waits until another block has
// looked at it, or has come as far, or none can. So two that both update in two steps meet every time.
void let_another_update(Lane* lane, uintptr_t address);
void forget_order();  // a launch begins

}  // namespace simt
