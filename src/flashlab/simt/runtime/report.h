// What is kept of each launch until Python asks for it.
#pragma once
#include "counters.h"
#include "events.h"

namespace simt {

int record_launch(const char* text, const void* kernel, const Launch& launch);  // its number
void record_counts(const Sites& sites);                                         // of the last launch
void record_events(uint64_t block, std::vector<Event>& events);                 // of the last launch
// What kernels print appears when the launch is over, in the order of the blocks.
constexpr size_t PRINTED_LIMIT = 4 << 20;  // of a launch; Python shows less
void record_printed(uint64_t block, const std::string& text);
void show_printed();
void forget_run();  // all of the call before
std::string records_text();

// How far the call is, for Python to look at while it runs: in shared memory.
struct Progress {
    std::atomic<uint64_t> launches, blocks, done;  // launches begun; of the last, its blocks and those finished
    char kernel[128];                              // of the last
};
extern Progress* progress;

}  // namespace simt
