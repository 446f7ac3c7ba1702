// Signals: see faults.h.
//
// A wild pointer, a division by zero, an overflowing stack: the CPU raises a signal, the handler files a
// finding and jumps out of the lane, back to the scheduler, and the launch ends. A kernel that never ends is
// left the same way, when Python cancels it. A fault outside of a lane is none of our business: it goes to
// whoever had the handler before.
#include "faults.h"
#include "findings.h"
#include "global_memory.h"
#include <mutex>
#include <signal.h>
#include <stdlib.h>
#include <ucontext.h>

namespace simt {

static const int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
static const int CANCEL = SIGURG;  // ignored by default, so that a late one does no harm
static struct sigaction old_faults[5], old_cancel;
static pthread_key_t key = [] {
    pthread_key_t k;
    pthread_key_create(&k, nullptr);
    return k;
}();
static std::vector<Worker>* watched;
static std::mutex mutex;
static std::atomic<int> cancel_reason{0};
constexpr size_t HANDLER_STACK = 64 << 10;

bool cancelled() { return cancel_reason != 0; }

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
    f.pc = in_module(pc) && !worker->inside ? pc + 1 : lane->pc;  // a report looks just before the address
    f.other_pc = lane->pc;  // second best: where it last entered the runtime
    file(lane, f);
    stop_launch(&worker->block, error);
    siglongjmp(worker->escape, 1);
}

static void on_fault(int signal, siginfo_t* info, void* context) {
    Worker* worker = (Worker*)pthread_getspecific(key);
    if (!worker || !worker->in_lane) {  // not ours: let it happen again under the old handler
        for (int i = 0; i < 5; i++)
            if (FAULTS[i] == signal) sigaction(signal, &old_faults[i], nullptr);
        return;
    }
    const Lane* lane = worker->running;
    const uintptr_t a = (uintptr_t)info->si_addr;
    if (signal == SIGFPE) leave_lane(worker, {"division-by-zero"}, cudaErrorLaunchFailure, context);
    if (signal == SIGILL || signal == SIGABRT) leave_lane(worker, {"trap"}, cudaErrorLaunchFailure, context);
    if (a < (uintptr_t)lane->stack && a + 17 * PAGE >= (uintptr_t)lane->stack) {
        Finding f{"stack-overflow"};
        f.value[0] = STACK;
        leave_lane(worker, f, cudaErrorLaunchFailure, context);
    }
    Finding f{"global-out-of-bounds", "access"};
    describe_address(f, a, 1);
    // The CPU does not say which address when it is impossible (not even a number the CPU has wires for) or
    // misaligned.
    if (signal == SIGSEGV && info->si_code != SEGV_MAPERR && info->si_code != SEGV_ACCERR)
        f.text = "wild-or-misaligned";
    leave_lane(worker, f, cudaErrorIllegalAddress, context);
}
static void on_cancel(int, siginfo_t*, void* context) {
    Worker* worker = (Worker*)pthread_getspecific(key);
    if (!worker || !worker->in_lane || worker->inside || !cancelled()) return;
    Finding f{cancel_reason == 1 ? "timeout" : "interrupted"};
    leave_lane(worker, f, cudaErrorLaunchTimeout, context);
}

void start_watching(std::vector<Worker>& workers) {
    struct sigaction action {};
    sigemptyset(&action.sa_mask);
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    action.sa_sigaction = on_fault;
    for (int i = 0; i < 5; i++) sigaction(FAULTS[i], &action, &old_faults[i]);
    action.sa_flags |= SA_RESTART;
    action.sa_sigaction = on_cancel;
    sigaction(CANCEL, &action, &old_cancel);
    std::lock_guard<std::mutex> lock(mutex);
    watched = &workers;
}
void stop_watching() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        watched = nullptr;
    }
    for (int i = 0; i < 5; i++) sigaction(FAULTS[i], &old_faults[i], nullptr);
    sigaction(CANCEL, &old_cancel, nullptr);
}
void enter_worker(Worker* worker) {
    stack_t stack{};
    stack.ss_sp = malloc(HANDLER_STACK);
    stack.ss_size = HANDLER_STACK;
    sigaltstack(&stack, nullptr);
    pthread_setspecific(key, worker);
    std::lock_guard<std::mutex> lock(mutex);
    worker->alive = true;
}
void leave_worker() {
    Worker* worker = (Worker*)pthread_getspecific(key);
    {
        std::lock_guard<std::mutex> lock(mutex);
        worker->alive = false;
    }
    pthread_setspecific(key, nullptr);
    stack_t stack{}, off{};
    sigaltstack(nullptr, &stack);
    off.ss_flags = SS_DISABLE;
    sigaltstack(&off, nullptr);
    free(stack.ss_sp);
}

// Python: end the launch that runs. 1 because it took too long, 2 because the user interrupted it, 0 to begin
// anew. To be repeated until the launch is over: a lane that is inside the runtime at the moment is left
// alone.
extern "C" void simt_cancel(int reason) {
    cancel_reason = reason;
    std::lock_guard<std::mutex> lock(mutex);
    if (!reason || !watched) return;
    for (Worker& w : *watched)
        if (w.alive) pthread_kill(w.thread, CANCEL);
}

}  // namespace simt
