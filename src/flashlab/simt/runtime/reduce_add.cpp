// The additions of a TMA reduction: each element by itself is an atomic addition, rounded to the nearest.
#include "bulk_store.h"
#include "../include/simt/half_bits.h"

namespace simt {

template <class Bits, class F>
static bool add_each(uintptr_t global, const uint8_t* dense, int bytes, F sum) {
    for (int i = 0; i < bytes; i += (int)sizeof(Bits)) {
        Bits* to = (Bits*)(global + (uintptr_t)i);
        Bits more, was = __atomic_load_n(to, __ATOMIC_RELAXED);
        memcpy(&more, dense + i, sizeof more);
        while (!__atomic_compare_exchange_n(to, &was, sum(was, more), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    }
    return true;
}
template <class Bits>
static Bits plus(Bits a, Bits b) {
    return (Bits)(a + b);
}

bool reduce_add(CUtensorMapDataType type, uintptr_t global, const uint8_t* dense, int bytes) {
    switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32: return add_each<uint32_t>(global, dense, bytes, plus<uint32_t>);
    case CU_TENSOR_MAP_DATA_TYPE_UINT64: return add_each<uint64_t>(global, dense, bytes, plus<uint64_t>);
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
        return add_each<uint16_t>(global, dense, bytes, [](uint16_t a, uint16_t b) {
            return simt_float_to_half(simt_half_to_float(a) + simt_half_to_float(b));
        });
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
        return add_each<uint16_t>(global, dense, bytes, [](uint16_t a, uint16_t b) {
            return simt_float_to_bf16(simt_bf16_to_float(a) + simt_bf16_to_float(b));
        });
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
        return add_each<uint32_t>(global, dense, bytes, [](uint32_t a, uint32_t b) {
            float x, y;
            memcpy(&x, &a, 4), memcpy(&y, &b, 4);
            x += y;
            memcpy(&a, &x, 4);
            return a;
        });
    default: return false;
    }
}

}  // namespace simt
