// Functions of the C and C++ libraries that a source calls and that must not happen as they stand. The linker sends the
// module's calls of NAME to __wrap_NAME, and ours of __real_NAME to the library (build.py has the list).
#include "faults.h"
#include "findings.h"
#include "host_part.h"
#include <malloc.h>
#include <stdlib.h>
#include <unistd.h>
#include <new>

namespace simt {

// In a kernel it ends the launch. (The runtime allocates on a lane's stack too: that is not the kernel's call.)
static inline __attribute__((always_inline)) void not_in_a_kernel(const char* name, uintptr_t pc) {
    Lane* me = current_lane();
    if (!me || me->block->worker->inside) return;
    Inside inside(me, pc);
    file_fatal(me, {"host-call", "", name});
}

// The host part may ask for memory without end: half of the machine's is enough, and then there is none.
static const int64_t limit = std::max<int64_t>(1 << 30, (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE) / 2);
static std::atomic<int64_t> in_use{0};

extern "C" {
void* __real_malloc(size_t);
void* __real_calloc(size_t, size_t);
void* __real_realloc(void*, size_t);
void __real_free(void*);
}
static void* charged(void* p) {
    if (!p || (in_use += (int64_t)malloc_usable_size(p)) <= limit) return p;
    in_use -= (int64_t)malloc_usable_size(p);
    __real_free(p);
    return nullptr;
}
static void discharge(void* p) {
    if (p) in_use -= (int64_t)malloc_usable_size(p);
}

extern "C" {
void* __wrap_malloc(size_t n) {
    not_in_a_kernel("malloc", CALLER);
    return charged(__real_malloc(n));
}
void* __wrap_calloc(size_t n, size_t size) {
    not_in_a_kernel("calloc", CALLER);
    return charged(__real_calloc(n, size));
}
void* __wrap_realloc(void* p, size_t n) {
    not_in_a_kernel("realloc", CALLER);
    discharge(p);
    return charged(__real_realloc(p, n));
}
void __wrap_free(void* p) {
    not_in_a_kernel("free", CALLER);
    discharge(p);
    __real_free(p);
}
#define WRAP(T, name, text, parameters, ...) \
    T __real_##name parameters; \
    T __wrap_##name parameters { \
        not_in_a_kernel(text, CALLER); \
        return __real_##name(__VA_ARGS__); \
    }
WRAP(void*, _Znwm, "new", (size_t n), n)
WRAP(void*, _Znam, "new[]", (size_t n), n)
WRAP(void, _ZdlPv, "delete", (void* p), p)
WRAP(void, _ZdaPv, "delete", (void* p), p)
WRAP(void, _ZdlPvm, "delete", (void* p, size_t n), p, n)
WRAP(void, _ZdaPvm, "delete", (void* p, size_t n), p, n)
WRAP(void*, __cxa_allocate_exception, "throw", (size_t n), n)

// The process would end before Python knows why.
#define WRAP_EXIT(name) \
    __attribute__((noreturn)) void __real_##name(int); \
    __attribute__((noreturn)) void __wrap_##name(int code) { \
        not_in_a_kernel(#name, CALLER); \
        fflush(stdout); \
        end_host("exit", code, CALLER - 1, #name); \
    }
WRAP_EXIT(exit)
WRAP_EXIT(_exit)
WRAP_EXIT(_Exit)
WRAP_EXIT(quick_exit)
__attribute__((noreturn)) void __real_abort();
__attribute__((noreturn)) void __wrap_abort() {
    not_in_a_kernel("abort", CALLER);
    __real_abort();
}
__attribute__((noreturn)) void __real___cxa_throw(void*, void*, void (*)(void*));
__attribute__((noreturn)) void __wrap___cxa_throw(void* thrown, void* type, void (*destroy)(void*)) {
    not_in_a_kernel("throw", CALLER);
    note_throw();
    __real___cxa_throw(thrown, type, destroy);
}
}

void end_process(int code) { __real__exit(code); }

}  // namespace simt
