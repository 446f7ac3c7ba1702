// The eyes of the watched build. g++ with -fsanitize=thread calls a function before each load and
// store that may touch memory others can see, and with -fsanitize=bounds one for each index that is too
// large. Those functions usually come from a library of the compiler; here they are ours.
#include "faults.h"
#include "global_shadow.h"
#include "values.h"
#include "warpgroup.h"

namespace simt {

enum Style : uint8_t { PLAIN, UNALIGNED, VOLATILE, PART };  // PART: of a struct that is copied in one go

// Does the instruction behind a hook, the store itself, store a constant? Who sets a flag that it has looked at before
// stores what it would have stored in any case.
static bool stores_a_constant(uintptr_t pc) {
#ifdef __x86_64__
    const uint8_t* code = (const uint8_t*)pc;
    while (*code == 0x66 || (*code & 0xf0) == 0x40) code++;  // prefixes: of 2 bytes, and of the upper registers
    return (*code & 0xfe) == 0xc6;                           // mov [...], a constant
#else
    (void)pc;
    return false;
#endif
}
// A volatile access is one by itself, like an atomic; but a load, and a store of what was made of it, are two.
static bool updates(Lane* me, uintptr_t a, uintptr_t pc) {
    const auto load = me->volatile_loads.find(a);
    if (load == me->volatile_loads.end()) return false;
    const bool update = load->second.call + 1 == me->calls || !stores_a_constant(pc);
    // A __threadfence() between: its turn may be what it has waited for, and what it has seen then comes before it.
    const bool fenced = me->fence.time >= load->second.time;
    if (update && fenced) let_another_update(me, a);
    me->volatile_known = fenced ? known_of_word(me, a) : load->second.known;
    me->volatile_loads.erase(load);
    return update;
}

static void access(Lane* me, uintptr_t a, int bytes, bool write, Style style, uintptr_t pc) {
    const bool waited_for = !write && style != VOLATILE && load_of_store(me, bytes);
    Inside inside(me, pc, !waited_for);
    Worker* worker = me->block->worker;
    const char* how = write ? "store" : "load";
    if (++me->accesses > 128 && !waited_for) {  // a lane far ahead would pile up half-filled requests
        let_others_run(me);
        me->pc = pc;
        // It is hardly ever outside of the runtime, where a signal would reach it.
        if (cancelled()) file_fatal(me, out_of_time(me), cudaErrorLaunchTimeout);
    }
    if (style != UNALIGNED && style != PART && a % bytes) file_misaligned(me, a, bytes, how);
    Conflict conflict;
    bool conflicts = false, watched = false;
    if (a - worker->window.low < worker->window.high - worker->window.low) {
        const uint64_t address = a - worker->window.base;
        const int site = worker->sites->find(pc, write ? SHARED_STORE : SHARED_LOAD);
        if (!worker->shadow->in_bounds(me, address, bytes, how)) {
            if (write) end_launch(me, cudaErrorIllegalAddress);  // it would hit something that is not its own
            return;
        }
        conflicts = worker->shadow->touch(me, address, bytes, write ? WRITE : READ, site, how,
                                          write && style != PART ? &conflict : nullptr);
        count_access(me, site, address, bytes);
    } else {
        const int site = worker->sites->find(pc, write ? GLOBAL_STORE : GLOBAL_LOAD);
        const bool counted = check_global(me, a, bytes, write, how);
        const bool update = write && !me->volatile_loads.empty() && updates(me, a, pc);
        const Access kind = update ? VOLATILE_UPDATE : style == VOLATILE ? VOLATILE_STORE : write ? WRITE : READ;
        if (kind == WRITE && style != PART) global_shadow.hold(me, a, bytes);
        if (style == VOLATILE && write) let_others_look(me, a);
        if (style == VOLATILE && !write) global_shadow.in_flight(me, a, bytes, false, false, how);
        else conflicts = global_shadow.touch(me, a, bytes, kind, executions(me, site), how, conflict, &watched);
        if (style == VOLATILE && write) meet(me, a, false, true);
        if (style == VOLATILE && !write) look(me, a, bytes), me->pc = pc;
        if (counted) count_access(me, site, a, bytes);
        if (style == VOLATILE && !write) {
            me->volatile_loads[a] = {me->calls, me->warp->time, 0};
            expect_to_learn(me, a);
        }
        if (conflicts && style == PART) file_conflict(me, conflict, pc, false), conflicts = false;
    }
    if (write && style != PART) expect_store(me, a, bytes, conflicts ? &conflict : nullptr, watched);
}
static inline __attribute__((always_inline)) void hook(void* p, int bytes, bool write, Style style, uintptr_t pc) {
    Lane* me = current_lane();
    if (!me) return;                                        // host code
    if ((uintptr_t)p - (uintptr_t)me->stack < STACK) {      // local memory
        if (__builtin_expect((uintptr_t)p - me->in_use_low < me->in_use_bytes, 0)) {  // by a wgmma, perhaps
            Inside inside(me, pc);
            if (me->block->worker->warpgroups->file_if_in_use(me, (uintptr_t)p, bytes, write, pc)) return;
        }
        if (!write && __builtin_expect(never_set(p, bytes), 0)) {
            Inside inside(me, pc, !load_of_store(me, bytes));
            file_never_set(me, "load");
        }
        return;
    }
    access(me, (uintptr_t)p, bytes, write, style, pc);
}
static void range(void* p, long bytes, bool write, uintptr_t pc) {  // a struct copied in one go
    for (char* at = (char*)p; bytes > 0; at += 16, bytes -= 16) hook(at, bytes < 16 ? (int)bytes : 16, write, PART, pc);
}

extern "C" {
#define HOOKS(n) \
    void __tsan_read##n(void* p) { hook(p, n, false, PLAIN, CALLER); } \
    void __tsan_write##n(void* p) { hook(p, n, true, PLAIN, CALLER); } \
    void __tsan_unaligned_read##n(void* p) { hook(p, n, false, UNALIGNED, CALLER); } \
    void __tsan_unaligned_write##n(void* p) { hook(p, n, true, UNALIGNED, CALLER); } \
    void __tsan_volatile_read##n(void* p) { hook(p, n, false, VOLATILE, CALLER); } \
    void __tsan_volatile_write##n(void* p) { hook(p, n, true, VOLATILE, CALLER); } \
    void __tsan_unaligned_volatile_read##n(void* p) { hook(p, n, false, UNALIGNED, CALLER); } \
    void __tsan_unaligned_volatile_write##n(void* p) { hook(p, n, true, UNALIGNED, CALLER); }
// clang-format off
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
// clang-format on
void __tsan_read_range(void* p, long bytes) { range(p, bytes, false, CALLER); }
void __tsan_write_range(void* p, long bytes) { range(p, bytes, true, CALLER); }
// Copies of whole structs, by the functions of language.h.
static void copied(const void* to, const void* from, size_t bytes, uintptr_t pc) {
    Lane* me = current_lane();
    if (!me || me->block->worker->inside) return;
    if (from) range((char*)from, (long)bytes, false, pc);
    range((char*)to, (long)bytes, true, pc);
}
void* __tsan_memcpy(void* to, const void* from, size_t n) { return copied(to, from, n, CALLER), memcpy(to, from, n); }
void* __tsan_memmove(void* to, const void* from, size_t n) {
    return copied(to, from, n, CALLER), memmove(to, from, n);
}
void* __tsan_memset(void* to, int byte, size_t n) { return copied(to, nullptr, n, CALLER), memset(to, byte, n); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

// Atomic operations have been checked by simt_atomic_check; they only have to be done.
#define FETCH_HOOK(bits, T, name, done) \
    T __tsan_atomic##bits##_##name(volatile T* p, T v, int) { return done(p, v, __ATOMIC_SEQ_CST); }
#define ATOMIC_HOOKS(bits, T) \
    T __tsan_atomic##bits##_load(const volatile T* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); } \
    void __tsan_atomic##bits##_store(volatile T* p, T v, int) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); } \
    FETCH_HOOK(bits, T, exchange, __atomic_exchange_n) \
    FETCH_HOOK(bits, T, fetch_add, __atomic_fetch_add) \
    FETCH_HOOK(bits, T, fetch_sub, __atomic_fetch_sub) \
    FETCH_HOOK(bits, T, fetch_and, __atomic_fetch_and) \
    FETCH_HOOK(bits, T, fetch_or, __atomic_fetch_or) \
    FETCH_HOOK(bits, T, fetch_xor, __atomic_fetch_xor) \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* e, T v, int, int) { \
        return __atomic_compare_exchange_n(p, e, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
    } \
    int __tsan_atomic##bits##_compare_exchange_weak(volatile T* p, T* e, T v, int, int) { \
        return __atomic_compare_exchange_n(p, e, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
    }
// clang-format off
ATOMIC_HOOKS(8, uint8_t)
ATOMIC_HOOKS(16, uint16_t)
ATOMIC_HOOKS(32, uint32_t)
ATOMIC_HOOKS(64, uint64_t)
// clang-format on
void __tsan_atomic_thread_fence(int) {}
void __tsan_atomic_signal_fence(int) {}

// -fsanitize=bounds: an index beyond the end of an array whose size the compiler knows.
struct UbsanType {
    uint16_t kind, info;
    char name[1];
};
struct UbsanIndex {
    const char* file;
    uint32_t line, column;
    const UbsanType *array, *index;
};
void __ubsan_handle_out_of_bounds(UbsanIndex* data, uintptr_t index) {
    Lane* me = current_lane();
    if (!me) return;
    Inside inside(me, CALLER);
    const bool narrow = data->index->info >> 1 <= 5 && (data->index->info & 1);  // 2^5 bits or fewer, signed
    file(me, {"index-out-of-bounds", "", data->array->name, {narrow ? (int32_t)index : (int64_t)index}});
}

// -fsanitize=alignment: an access through a pointer that is no multiple of what its type wants. (Where the compiler
// knows that, an access comes as an unaligned one, as those of memcpy do.)
struct UbsanMismatch {
    const char* file;
    uint32_t line, column;
    const UbsanType* type;
    unsigned char log_alignment, kind;  // 0 load, 1 store; then members, references and the like
};
void __ubsan_handle_type_mismatch_v1(UbsanMismatch* data, uintptr_t a) {
    Lane* me = current_lane();
    const int bytes = 1 << data->log_alignment;
    if (!me || data->kind > 1 || a % (unsigned)bytes == 0 || a - (uintptr_t)me->stack < STACK) return;
    Inside inside(me, CALLER);
    file_misaligned(me, a, bytes, data->kind == 1 ? "store" : "load");
}
}

}  // namespace simt
