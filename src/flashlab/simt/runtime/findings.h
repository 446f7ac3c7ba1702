// Findings: what a kernel did wrong. The runtime keeps the facts (where, who, what); Python makes the sentence.
#pragma once
#include "machine.h"

namespace simt {

struct Finding {  // most are made with the first fields alone, up to the last one that is needed
    const char* kind;              // a slug: "race", "global-out-of-bounds" ...
    const char* how = "";          // what was done: "load", "store", "ldmatrix" ...
    std::string text = "";         // a word or two
    int64_t value[3] = {0, 0, 0};  // what the kind needs: an offset, bytes, a limit
    uintptr_t pc = 0;              // return addresses; 0 is none
    uintptr_t other_pc = 0;
    int other_thread = -1, thread = -1;
    int launch = 0;
    uint64_t block = 0, sequence = 0, times = 1;
    int64_t other_block = -1;  // of other_thread, where it is another
    bool warning = false;      // it may be meant, and does no harm then
};

// Files a finding of this lane. The same one is kept once: between two warps rather than within one, of the
// lowest launch, block and thread, with the number of times it was seen.
void file(Lane* lane, const Finding& f);
// A finding after which the launch cannot go on.
[[noreturn]] void file_fatal(Lane* lane, const Finding& f, int error = cudaErrorLaunchFailure);
[[noreturn]] void file_misaligned(Lane* lane, uintptr_t address, int bytes, const char* how);
void file_of_launch(int launch, const Finding& f, int error);

Finding out_of_time(Lane* lane);  // scheduler.cpp: the call is cancelled; says what the lane waits for

extern std::atomic<int> last_error;
void forget_findings();
std::string findings_text();  // for Python, see findings.cpp

}  // namespace simt
