// Atomic read-modify-write on shared and global memory. They run inside the runtime, which checks the address
// and knows that two atomics on the same word are no race.
#pragma once
#include "language.h"
#include <type_traits>

extern "C" {
void simt_atomic_check(const void* p, int bytes, int needed);  // bounds, alignment, race, count; is the value read?
}

// The loop that every atomic is: read, compute, and try again when another thread was faster.
template <class T, class F>
SIMT_INLINE T simt_atomic(T* p, F update, int needed = 1) {
    typedef std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>> Bits;
    static_assert(sizeof(Bits) == sizeof(T), "the word that is compared is the value");
    simt_atomic_check(p, sizeof(T), needed);
    Bits old_bits = __atomic_load_n((Bits*)p, __ATOMIC_RELAXED), new_bits;
    T old_value, new_value;
    do {
        memcpy((void*)&old_value, &old_bits, sizeof(T));
        new_value = update(old_value);
        memcpy(&new_bits, (const void*)&new_value, sizeof(T));
    } while (!__atomic_compare_exchange_n((Bits*)p, &old_bits, new_bits, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old_value;
}
template <class T>
struct SimtSame {
    typedef T type;
};  // keeps `atomicAdd(p_float, 1)` from deducing two types
#define SIMT_ATOMIC(name, expression) \
    template <class T> \
    SIMT_INLINE T name(T* p, typename SimtSame<T>::type v) { \
        return simt_atomic(p, [v](T old) -> T { return expression; }); \
    }
SIMT_ATOMIC(atomicAdd, old + v)
SIMT_ATOMIC(atomicSub, old - v)
SIMT_ATOMIC(atomicMin, v < old ? v : old)
SIMT_ATOMIC(atomicMax, old < v ? v : old)
SIMT_ATOMIC(atomicAnd, (old & v))
SIMT_ATOMIC(atomicOr, old | v)
SIMT_ATOMIC(atomicXor, old ^ v)
SIMT_ATOMIC(atomicInc, old >= v ? T(0) : T(old + 1))
SIMT_ATOMIC(atomicDec, old == T(0) || old > v ? v : T(old - 1))
#undef SIMT_ATOMIC
template <class T>
SIMT_INLINE T atomicExch(T* p, typename SimtSame<T>::type v) {
    return simt_atomic(p, [v](T) -> T { return v; }, 0);
}
template <class T>
SIMT_INLINE T atomicCAS(T* p, typename SimtSame<T>::type compare, typename SimtSame<T>::type v) {
    return simt_atomic(p, [=](T old) -> T { return old == compare ? v : old; });
}
