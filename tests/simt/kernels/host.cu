// Host parts that do what ends a process. Beside each the words of the sentence. `// <-` marks the line that it names.
#include "simt.h"
#include <assert.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>
#include <stdexcept>
#include <thread>
#include <vector>

#define ENTRY(name) extern "C" int run_##name(float* p, int n)
__global__ void k(float* p) { p[threadIdx.x] = 1; }

// expect: HostError: follows a null pointer
ENTRY(null_pointer) { return *(volatile int*)(size_t)(n - 64); }  // <-

// expect: HostError: follows a pointer to memory that is not its own
ENTRY(a_wild_pointer) { return *(volatile int*)0x123456789000; }  // <-

ENTRY(an_exception) {  // expect: HostError: throws an exception|no such thing
    if (n) throw std::runtime_error("no such thing");  // <-
    return 0;
}

// expect: HostError: throws an exception|something that is no std::exception
ENTRY(an_exception_of_no_class) { throw n; }  // <-

ENTRY(an_assertion) {  // expect: HostError: fails the assertion `n < 0`
    assert(n < 0);  // <-
    return 0;
}

ENTRY(a_division) {  // expect: HostError: divides an integer by zero
    volatile int zero = n - 64;
    return 7 / zero;  // <-
}

volatile int sink;
__attribute__((noinline)) int deeper(int n) {
    volatile char pad[4096];
    pad[n % 4096] = 1;
    sink = pad[0];
    return deeper(n + 1) + pad[1];  // <-
}
// expect: HostError: overflows its stack
ENTRY(a_recursion) { return deeper(n); }

ENTRY(a_loop) {  // expect: KernelTimeout: was still running
    for (volatile int i = 0; n; i = i + 1) {}  // <-
    return 0;
}

ENTRY(a_sleep) {  // expect: KernelTimeout: was still running
    sleep(1000);
    return 0;
}

ENTRY(an_exit) {  // expect: HostError: calls exit(3)
    exit(3);  // <-
}

ENTRY(an_exit_at_once) {  // expect: HostError: calls _exit(4)
    _exit(4);  // <-
}

ENTRY(an_abort) {  // expect: HostError: ends with abort()
    abort();  // <-
}

ENTRY(a_signal) {  // expect: HostError: was ended by signal|was killed
    raise(SIGKILL);
    return 0;
}

ENTRY(a_double_free) {  // expect: HostError: ends with abort()|free
    char* a = (char*)malloc(100);
    free(a);
    char* volatile b = a;
    free(b);  // <-
    return 0;
}

ENTRY(memory_without_end_in_a_vector) {  // expect: HostError: bad_alloc
    std::vector<char*> all;
    for (;;) all.push_back(new char[1 << 28]);  // <-
}

ENTRY(an_exception_in_a_thread) {  // expect: HostError: terminate|exception|abort
    std::thread t([] { throw std::runtime_error("in a thread"); });
    t.join();
    return 0;
}

// expect: HostError: calls|only a kernel can call
ENTRY(a_shuffle_on_the_host) { return __shfl_sync(~0u, n, 0); }  // <-

// expect: LaunchError: returned -7
ENTRY(an_error_code) { return -7; }

ENTRY(a_refused_launch_that_nobody_looks_at) {  // expect: LaunchError: a block of 2000 threads; the limit is 1024
    k<<<1, 2000>>>(p);
    return 0;
}

// expect: HostError: comes to code that must not be reached|signal
ENTRY(a_trap) { __builtin_trap(); }

ENTRY(the_descriptors_are_closed) {  // expect: HostError: by itself|killed|signal|ended
    for (int i = 0; i < 1024; i++) close(i);
    return 0;
}

ENTRY(signals_are_ignored) {  // expect: KernelTimeout: was still running|killed
    for (int i = 1; i < 32; i++) signal(i, SIG_IGN);
    for (volatile int i = 0; n; i = i + 1) {}
    return 0;
}
