// Fibers: many flows of control in one OS thread, each with a stack of its own, switched by hand.
//
// A CUDA thread of the emulator is a fiber. It runs until it has to wait for others (a barrier, a shuffle),
// and then the switch costs a dozen instructions instead of a trip through the operating system.
#pragma once
#include <stddef.h>
#include <stdint.h>

#if !defined(__x86_64__) && !defined(SIMT_PORTABLE_FIBERS)
#define SIMT_PORTABLE_FIBERS 1
#endif

#ifdef SIMT_PORTABLE_FIBERS
#include <ucontext.h>
#endif

namespace simt {

struct Fiber {
#ifdef SIMT_PORTABLE_FIBERS
    ucontext_t context;
#else
    void* sp = nullptr;  // the stack pointer at which the fiber stopped; its registers lie there
#endif
};

// Makes `fiber` begin at entry() when it is first switched to, on the stack [stack, stack + bytes). entry
// never returns.
void fiber_prepare(Fiber& fiber, void* stack, size_t bytes, void (*entry)());

// Stops `from` (the caller) and goes on with `to`; returns when something switches back to `from`.
void fiber_switch(Fiber& from, Fiber& to);

const char* fiber_kind();  // "x86-64" or "ucontext"

}  // namespace simt
