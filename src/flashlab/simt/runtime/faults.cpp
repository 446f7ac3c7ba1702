// Signals: see faults.h.
//
// A wild pointer, a division by zero, an overflowing stack: the CPU raises a signal, the handler files a
// finding and jumps out of the lane, back to the scheduler, and the launch ends. A kernel that never ends is
// left the same way, when Python cancels it. A fault outside of a lane ends the host part (host_part.cpp).
#include "faults.h"
#include "global_memory.h"
#include "host_part.h"
#include <algorithm>
#include <stdlib.h>
#include <ucontext.h>

namespace simt {

static const int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS};
// Not thread_local: that memory lies beside the kernel's shared arrays, which it may overrun.
static const pthread_key_t key = [] {
    pthread_key_t k;
    pthread_key_create(&k, nullptr);
    return k;
}();
static Worker* this_worker() { return (Worker*)pthread_getspecific(key); }
static std::deque<Worker>* watched;
static std::mutex mutex;
static std::atomic<int> cancel_reason{0};
constexpr size_t HANDLER_STACK = 128 << 10;

int cancelled() { return cancel_reason; }

static uintptr_t program_counter(void* context) {
#if defined(__x86_64__)
    return (uintptr_t)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
    return (uintptr_t)((ucontext_t*)context)->uc_mcontext.pc;
#else
    (void)context;
    return 0;
#endif
}
static void leave_lane(Worker* worker, Finding f, int error, void* context) {
    Lane* lane = worker->running;
    const uintptr_t pc = program_counter(context);
    // From here on no cancellation interrupts; a broken stack may fault once more, and comes here again.
    const bool was_inside = worker->inside;
    worker->inside = true;
    if (was_inside) {
        f.pc = lane->pc;
    } else if (in_module(pc)) {
        f.pc = pc + 1;  // a report looks just before the address
    } else {            // in a library, or nowhere: who called it?
        uintptr_t pcs[24];
        const int n = backtrace(pcs, 24);
        for (int i = 0; i < n && !f.pc; i++)
            if (in_module(pcs[i])) f.pc = pcs[i] + 1;
        if (!f.pc) f.pc = lane->pc;
    }
    f.other_pc = lane->pc;  // second best: where it last entered the runtime
    file(lane, f);
    stop_launch(&worker->block, error);
    siglongjmp(worker->escape, 1);
}

static Finding cut_short() { return {cancelled() == 1 ? "timeout" : "interrupted"}; }

static void on_fault(int signal, siginfo_t* info, void* context) {
    Worker* worker = this_worker();
    // abort() inside the runtime is the C library's, which has found its heap destroyed, and holds its lock.
    if (!worker || !worker->in_lane || (worker->inside && signal == SIGABRT))
        end_host("signal", signal, program_counter(context), "", info);
    // A cancellation that met a lane between two stacks, and faulted when it walked up one of them.
    if (cancelled() && worker->inside) leave_lane(worker, cut_short(), cudaErrorLaunchTimeout, context);
    const Lane* lane = worker->running;
    const uintptr_t a = (uintptr_t)info->si_addr;
    if (signal == SIGFPE) leave_lane(worker, {"division-by-zero"}, cudaErrorLaunchFailure, context);
    if (signal != SIGSEGV && signal != SIGBUS) leave_lane(worker, {"trap"}, cudaErrorLaunchFailure, context);
    if (a < (uintptr_t)lane->stack && a + STACK_GUARD + PAGE >= (uintptr_t)lane->stack)
        leave_lane(worker, {"stack-overflow", "", "", {STACK}}, cudaErrorIllegalAddress, context);
    Finding f{"global-out-of-bounds", "access"};
    describe_address(f, a, 1);
    // The CPU does not say which address when it is impossible (not even a number the CPU has wires for) or misaligned.
    if (signal == SIGSEGV && info->si_code != SEGV_MAPERR && info->si_code != SEGV_ACCERR)
        f.text = "wild-or-misaligned";
    leave_lane(worker, f, cudaErrorIllegalAddress, context);
}
// A lane whose registers, the program counter among them, are the same as before is in a loop in which nothing happens.
static void note_registers(Worker* worker, void* context) {
    const auto& machine = ((ucontext_t*)context)->uc_mcontext;
#if defined(__x86_64__)
    const auto* first = machine.gregs;
    const int count = REG_RIP + 1;
#elif defined(__aarch64__)
    const auto* first = machine.regs;  // and behind them sp and pc
    const int count = 33;
#else
    return;
#endif
    uint64_t hash = 1469598103934665603u;
    for (int i = 0; i < count; i++) hash = (hash ^ (uint64_t)first[i]) * 1099511628211u;
    const bool in_vain = std::count(std::begin(worker->samples), std::end(worker->samples), hash) > 0;
    worker->samples[worker->sampled++ % 8] = hash;
    if (!in_vain) return;
    worker->in_vain++;
    // Meanwhile other blocks get the processor. (`inside`, or the next signal would find it asleep.)
    const timespec nap = {0, (long)std::min<size_t>(500, worker->launch->working + 1) * 1000000};
    worker->inside = true;
    nanosleep(&nap, nullptr);
    worker->inside = false;
}
static void on_cancel(int, siginfo_t* info, void* context) {
    Worker* worker = this_worker();
    if (!cancelled()) {
        if (worker && worker->in_lane && !worker->inside) note_registers(worker, context);
        return;
    }
    if (!worker && on_host()) end_host("stuck", 0, program_counter(context), "", info);
    if (!worker || !worker->in_lane || worker->inside) return;
    leave_lane(worker, cut_short(), cudaErrorLaunchTimeout, context);
}

void install_handlers() {
    struct sigaction action{};
    sigemptyset(&action.sa_mask);
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    action.sa_sigaction = on_fault;
    for (int fault : FAULTS) sigaction(fault, &action, nullptr);
    action.sa_flags |= SA_RESTART;
    action.sa_sigaction = on_cancel;
    sigaction(CANCEL, &action, nullptr);
}
void enter_thread() {
    stack_t stack{};
    stack.ss_sp = malloc(HANDLER_STACK);
    stack.ss_size = HANDLER_STACK;
    sigaltstack(&stack, nullptr);
}
void leave_thread() {
    stack_t stack{}, off{};
    sigaltstack(nullptr, &stack);
    off.ss_flags = SS_DISABLE;
    sigaltstack(&off, nullptr);
    free(stack.ss_sp);
}
void enter_worker(Worker* worker) {
    enter_thread();
    pthread_setspecific(key, worker);
    std::lock_guard<std::mutex> lock(mutex);
    worker->alive = true;
}
void leave_worker() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        this_worker()->alive = false;
    }
    pthread_setspecific(key, nullptr);
    leave_thread();
}
void watch(std::deque<Worker>* workers) {
    std::lock_guard<std::mutex> lock(mutex);
    watched = workers;
}
Worker& one_more(std::deque<Worker>& workers) {
    std::lock_guard<std::mutex> lock(mutex);
    return workers.emplace_back();
}
void sample(Worker* worker) {
    std::lock_guard<std::mutex> lock(mutex);
    if (worker->alive) pthread_kill(worker->thread, CANCEL);
}

// To be repeated until the launch is over: a lane that is inside the runtime at the moment is left alone.
void cancel(int reason) {
    cancel_reason = reason;
    std::lock_guard<std::mutex> lock(mutex);
    if (!reason || !watched) return;
    for (Worker& w : *watched)
        if (w.alive) pthread_kill(w.thread, CANCEL);
}

}  // namespace simt
