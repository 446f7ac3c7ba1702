// The small calls that a kernel makes: who am I, printf, assert, atomics, addresses of shared memory.
#include "global_shadow.h"
#include "host_part.h"
#include "report.h"
#include "values.h"
#include <stdarg.h>
#include <time.h>

namespace simt {

extern "C" {
// ---- odds and ends ---------------------------------------------------------------------------------
long long clock64() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}
void simt_bounds(long long threads, ...) {
    Lane* me = kernel_lane(CALLER);
    if (me->block->threads <= threads) return;
    Inside inside(me, CALLER);
    file_fatal(me, {"launch-configuration", "", "bounds", {me->block->threads, threads}}, cudaErrorInvalidValue);
}
void simt_fence() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    ENTER_FROM_KERNEL(me);
    if (me->block->launch->checked) fence(me);
}
// The host part has written to an array with one of the calls of host_api.h.
void simt_written(const void* p, size_t bytes) { global_shadow.written((uintptr_t)p, bytes); }
void simt_yield() {
    ENTER_FROM_KERNEL(me);
    wait_in_vain(me);
}

// ---- shared memory addresses --------------------------------------------------------------------
uint32_t simt_shared_address(const void* p) {
    Lane* me = kernel_lane(CALLER);
    const SharedWindow& w = me->block->worker->window;
    const uintptr_t a = (uintptr_t)p;
    if (a < w.low || a > w.high) {
        Inside inside(me, CALLER);
        file_fatal(me, {"not-shared"}, cudaErrorIllegalAddress);
    }
    return (uint32_t)(a - w.base);
}

// ---- atomics ------------------------------------------------------------------------------------
void simt_atomic_check(const void* p, int bytes, int needed) {
    Lane* me = current_lane();
    if (!me) return;
    Inside inside(me, CALLER);
    Worker* worker = me->block->worker;
    const uintptr_t a = (uintptr_t)p;
    bool learns = false;
    if (a % bytes) file_misaligned(me, a, bytes, "atomic");
    if (a - worker->window.low < worker->window.high - worker->window.low) {
        const uint64_t address = a - worker->window.base;
        const int site = worker->sites->find(me->pc, SHARED_ATOMIC);
        if (!worker->shadow->in_bounds(me, address, bytes, "atomic")) end_launch(me, cudaErrorIllegalAddress);
        if (me->block->launch->checked)
            worker->shadow->touch(me, address, bytes, needed ? ATOMIC : EXCHANGE, site, "atomic", nullptr);
        count_access(me, site, address, bytes);
    } else {
        const int site = worker->sites->find(me->pc, GLOBAL_ATOMIC);
        const bool counted = check_global(me, a, bytes, true, "atomic");
        if (me->block->launch->checked) {
            Conflict none;
            let_others_look(me, a);
            global_shadow.touch(me, a, bytes, needed ? ATOMIC : EXCHANGE, 0, "atomic", none);
            meet(me, a, false, true);
            learns = true;
        }
        if (counted) count_access(me, site, a, bytes);
        look(me, a, bytes);
    }
    if (++me->accesses > 64) let_others_run(me);  // it may be spinning on a lock
    if (learns) expect_to_learn(me, a);
}

// ---- the end of a thread ------------------------------------------------------------------------
void simt_trap() {
    ENTER_FROM_KERNEL(me);
    file_fatal(me, {"trap"});
}
// `assert` and `printf` of the module come here (build.py); host code goes on to the library.
__attribute__((noreturn)) void __wrap___assert_fail(const char* expression, const char*, unsigned, const char*) {
    Lane* me = current_lane();
    if (!me) end_host("assert", 0, CALLER - 1, expression);
    Inside inside(me, CALLER);
    file_fatal(me, {"assert", "", expression}, cudaErrorAssert);
}
int __wrap_printf(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    Lane* me = current_lane();
    int n;
    if (!me) {
        n = vprintf(format, arguments);
    } else {
        Inside inside(me, CALLER);
        char line[4096];
        n = vsnprintf(line, sizeof line, format, arguments);
        std::string& printed = *me->block->worker->printed;
        if (n > 0 && printed.size() < PRINTED_LIMIT) printed.append(line, std::min<size_t>(n, sizeof line - 1));
    }
    va_end(arguments);
    return n;
}
}

}  // namespace simt
