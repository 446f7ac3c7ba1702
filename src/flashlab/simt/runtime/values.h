// The values that lanes store, and those that were never set.
//
// A hook comes before its store, so what is stored can be looked at only when the lane next enters the
// runtime: until then the store is pending. Two questions wait for it. Is it the pattern with which the
// compiler fills locals that nothing has set (-ftrivial-auto-var-init=pattern)? And where another lane has
// stored to the same place: is it the same value, which does no harm?
//
// `*to = *from` of structs is one instruction with two hooks, and g++ puts that of the store first. So the load that
// comes next, of as many bytes, does not settle the store: the hook after it does.
#pragma once
#include "findings.h"

namespace simt {

constexpr uint32_t NEVER_SET = 0xfefefefeu;

// Do these bytes hold what was never set? At least half of them: a struct may have padding, of one word in
// four. A single byte of that value says nothing.
inline __attribute__((always_inline)) bool never_set(const void* p, int bytes) {
    if (bytes == 4) {
        uint32_t v;
        memcpy(&v, p, 4);
        return v == NEVER_SET;
    }
    if (bytes == 2) {
        uint16_t v;
        memcpy(&v, p, 2);
        return v == (uint16_t)NEVER_SET;
    }
    int words = 0;
    for (int i = 0; i + 4 <= bytes; i += 4) {
        uint32_t v;
        memcpy(&v, (const char*)p + i, 4);
        words += v == NEVER_SET;
    }
    return words && words * 8 >= bytes;
}

// Files that a lane uses, in the way `how`, what it never set.
void file_never_set(Lane* lane, const char* how, uintptr_t pc = 0);

void file_conflict(Lane* lane, const Conflict& c, uintptr_t pc, bool warning);

// The store that the lane is about to do. conflict: with an earlier one; null where there is none.
// watched: whether the value changes is of interest (GlobalShadow::changed).
void expect_store(Lane* lane, uintptr_t address, int bytes, const Conflict* conflict, bool watched = false);
void settle_store(Lane* lane);  // looks at it, once it has been done
// The lane's load or atomic of this word comes next: what other blocks have published there it then knows. (If it learnt
// now, it could miss what the load is going to see.)
inline void expect_to_learn(Lane* lane, uintptr_t address) { lane->store.address = address, lane->store.bytes = -1; }
// Perhaps the load that a pending store waits for. True once.
inline bool load_of_store(Lane* lane, int bytes) {
    PendingStore& s = lane->store;
    if (s.bytes != bytes || s.load_came) return false;
    return s.load_came = true;
}

}  // namespace simt
