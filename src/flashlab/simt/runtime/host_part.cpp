// The thread in which the host part runs, and its ends: see host_part.h.
#include "host_part.h"
#include "faults.h"
#include <exception>
#include <stdlib.h>
#include <typeinfo>
#include <unistd.h>
#include <unwind.h>

namespace simt {

Ending ending;
static std::atomic<int> stage{0};  // 0: it runs; 1: its end is being written down; 2: and has been announced
static pthread_t thread;
static std::atomic<bool> begun{false};
static int notify_fd = -1;
static uintptr_t stack_low;
static uintptr_t throw_pcs[16];  // where the last exception was thrown
static int throw_count;
constexpr size_t HOST_STACK = 8 << 20;

bool on_host() { return begun && pthread_equal(pthread_self(), thread); }

struct Trace {
    uintptr_t* pcs;
    int count, room;
};
int backtrace(uintptr_t* pcs, int room) {
    Trace trace = {pcs, 0, room};
    _Unwind_Backtrace(
        [](_Unwind_Context* context, void* to) {
            Trace& t = *(Trace*)to;
            int before = 0;
            const uintptr_t pc = _Unwind_GetIPInfo(context, &before);
            if (!pc || t.count == t.room) return _URC_END_OF_STACK;
            t.pcs[t.count++] = before ? pc : pc - 1;  // a return address is the next instruction's
            return _URC_NO_REASON;
        },
        &trace);
    return trace.count;
}

void note_throw() { throw_count = backtrace(throw_pcs, sizeof throw_pcs / sizeof *throw_pcs); }

static void announce() {
    if (stage.exchange(2) == 2) return;
    char byte = 1;
    while (write(notify_fd, &byte, 1) < 0 && errno == EINTR) {}
}

void end_host(const char* kind, int code, uintptr_t pc, const char* text, siginfo_t* info) {
    if (notify_fd < 0) end_process(code);  // in the constructor of a global variable: there is no call yet
    int none = 0;
    if (stage.compare_exchange_strong(none, 1)) {
        ending = Ending();
        ending.kind = kind, ending.code = code, ending.host = on_host();
        if (info) {
            // The CPU does not say which address when it is impossible.
            const bool known = info->si_code == SEGV_MAPERR || info->si_code == SEGV_ACCERR;
            ending.address = known ? (uintptr_t)info->si_addr : ~(uintptr_t)0;
            ending.stack = ending.host && ending.address + (1 << 20) > stack_low && ending.address < stack_low + 65536;
        }
        strncpy(ending.text, text, sizeof ending.text - 1);
        if (pc) ending.pcs[ending.count++] = pc;
        if (!strcmp(kind, "exception"))
            for (int i = 0; i < throw_count; i++) ending.pcs[ending.count++] = throw_pcs[i];
        const int room = (int)(sizeof ending.pcs / sizeof *ending.pcs) - ending.count;
        ending.count += backtrace(ending.pcs + ending.count, room);
    }
    announce();  // at once where the lines above have failed themselves
    for (;;) pause();  // the process ends as soon as Python has been told
}

void called_on_host(uintptr_t pc) { end_host("device-call", 0, pc - 1); }

// Both ABIs that the emulator runs on hand out integer and floating-point registers independently of each
// other, and put what is left over on the stack in 8 bytes each. So one call with every register and plenty
// of stack calls any function of numbers and pointers: it looks only at those that are its own.
#if defined(__aarch64__)
constexpr size_t INTEGERS = 8;
#else
constexpr size_t INTEGERS = 6;
#endif
constexpr size_t FLOATS = 8, ON_STACK = 32;
template <class T, size_t>
using Each = T;
template <class R, size_t... I, size_t... F, size_t... S>
static R call_with(void* function, const uint64_t* i, const double* f, const uint64_t* s, std::index_sequence<I...>,
                   std::index_sequence<F...>, std::index_sequence<S...>) {
    typedef R Function(Each<uint64_t, I>..., Each<double, F>..., Each<uint64_t, S>...);
    return ((Function*)function)(i[I]..., f[F]..., s[S]...);
}
static void run(Call& call) {
    uint64_t integers[INTEGERS] = {}, stack[ON_STACK] = {};
    double floats[FLOATS] = {};
    size_t i = 0, f = 0, s = 0;
    for (int n = 0; n < call.count; n++) {
        if (call.kinds[n] == 'i' && i < INTEGERS) integers[i++] = call.words[n];
        else if (call.kinds[n] == 'f' && f < FLOATS) memcpy(&floats[f++], &call.words[n], 8);
        else if (s < ON_STACK) stack[s++] = call.words[n];
    }
    auto called = [&](auto result) {
        result =
            call_with<decltype(result)>(call.function, integers, floats, stack, std::make_index_sequence<INTEGERS>(),
                                        std::make_index_sequence<FLOATS>(), std::make_index_sequence<ON_STACK>());
        memcpy(&call.returned, &result, 8);
    };
    if (call.returns_float) called(0.);
    else called(uint64_t());
}

static void* host_main(void* argument) {
    thread = pthread_self();
    begun = true;
    pthread_attr_t attributes;
    void* low = nullptr;
    size_t bytes = 0;
    if (!pthread_getattr_np(pthread_self(), &attributes)) {
        pthread_attr_getstack(&attributes, &low, &bytes);
        pthread_attr_destroy(&attributes);
    }
    stack_low = (uintptr_t)low;
    enter_thread();
    throw_count = 0;
    try {
        run(*(Call*)argument);
    } catch (const std::exception& e) { end_host("exception", 0, 0, e.what()); } catch (...) {
        end_host("exception", 0, 0, "something that is no std::exception");
    }
    leave_thread();
    int none = 0;
    if (stage.compare_exchange_strong(none, 1)) {
        ending = Ending();
        ending.kind = "returned";
        announce();
    }
    return nullptr;
}

bool begin_call(Call& call, int notify) {
    stage = 0;
    notify_fd = notify;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, HOST_STACK);
    const bool ok = pthread_create(&thread, &attributes, host_main, &call) == 0;
    pthread_attr_destroy(&attributes);
    return ok;
}
void interrupt_call() { pthread_kill(thread, CANCEL); }
void finish_call() { pthread_join(thread, nullptr); }

}  // namespace simt
