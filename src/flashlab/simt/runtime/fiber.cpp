// The context switch: see fiber.h.
#include "fiber.h"

namespace simt {

#ifdef SIMT_PORTABLE_FIBERS

// POSIX does it on any CPU. Slower: each switch also asks the kernel for the signal mask.
void fiber_prepare(Fiber& fiber, void* stack, size_t bytes, void (*entry)()) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stack;
    fiber.context.uc_stack.ss_size = bytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
}
void fiber_switch(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }
const char* fiber_kind() { return "ucontext"; }

#else

// The System V ABI lets a function clobber every register but rbx, rbp, r12-r15 and rsp. Whoever calls
// simt_switch has saved what it needs of the others, so that these seven are the whole state of a fiber.
//   rdi: where to store the stack pointer of the fiber that stops        rsi: the stack pointer to go on with
extern "C" __attribute__((naked, noinline)) void simt_switch(void**, void*) {
    asm("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        "movq %rsp, (%rdi)\n"
        "movq %rsi, %rsp\n"
        "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
        "ret\n");
}
// A fresh stack looks as if the fiber had been stopped just before entry(): six registers, and entry as
// return address. At entry the ABI wants rsp + 8 to be a multiple of 16.
void fiber_prepare(Fiber& fiber, void* stack, size_t bytes, void (*entry)()) {
    uintptr_t top = ((uintptr_t)stack + bytes) & ~(uintptr_t)15;
    void** sp = (void**)top;
    *--sp = nullptr;  // the return address of entry: never used
    *--sp = (void*)entry;
    for (int i = 0; i < 6; i++) *--sp = nullptr;
    fiber.sp = sp;
}
void fiber_switch(Fiber& from, Fiber& to) { simt_switch(&from.sp, to.sp); }
const char* fiber_kind() { return "x86-64"; }

#endif

}  // namespace simt
