// The host part of a source: the entry that Python calls and what that calls, outside of every kernel.
//
// It is ordinary C++ and may do anything: follow a null pointer, throw, call exit(), never return. It runs in
// a thread of its own, and each of its ends is an Ending that serve.cpp reports to Python.
#pragma once
#include <signal.h>
#include <stdint.h>

namespace simt {

struct Ending {
    const char* kind = "";  // "returned", "exit", "signal", "assert", "exception", "stuck"
    int code = 0;           // of exit(), or the signal's number
    uintptr_t address = 0;  // that a SIGSEGV was about
    bool stack = false;     // ... which lies just beyond the thread's stack
    bool host = true;       // it was the host part's thread, not the emulator's own
    uintptr_t pcs[48];      // where it happened, innermost first; inside the instruction
    int count = 0;
    char text[512] = "";    // of an assertion, an exception
};
extern Ending ending;

// Calls an entry in a new thread. `notify` gets a byte when it has ended, in whatever way.
// false: no thread could be made.
struct Call {
    void* function;
    const uint64_t* words;  // the arguments, as 8 bytes each
    const char* kinds;      // 'i' an integer or pointer, 'f' a float or double
    int count;
    bool returns_float;  // it returns a double, or a float (in the lower half)
    uint64_t returned = 0;
};
bool begin_call(Call& call, int notify);
void interrupt_call();  // makes the thread end as "stuck", wherever it is
void finish_call();     // after "returned"

[[noreturn]] void end_process(int code);  // _exit() itself; as the module calls it, it is an end of the host part

bool on_host();  // is this the thread of the host part?
// Ends it; the thread never goes on. The first end counts.
[[noreturn]] void end_host(const char* kind, int code, uintptr_t pc, const char* text = "", siginfo_t* info = nullptr);
void note_throw();
int backtrace(uintptr_t* pcs, int room);  // of the caller

}  // namespace simt
