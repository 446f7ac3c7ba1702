// The record of the launches, and the C functions through which Python sets up a run and reads what came of it.
#include "report.h"
#include "global_memory.h"
#include "shadow.h"
#include <algorithm>
#include <array>
#include <map>

namespace simt {

struct Record {
    std::string text;
    const void* kernel;
    dim3 grid, block;
    size_t shared_bytes;
    std::map<std::pair<uintptr_t, int>, std::array<uint64_t, COUNTERS>> counts;  // by place and kind
    std::map<uint64_t, std::vector<Event>> events;                               // by block
};
static std::vector<Record> records;
static std::mutex mutex;
static std::map<uint64_t, std::string> printed;  // by the launch that runs, by block
static size_t printed_bytes;

int record_launch(const char* name, const void* kernel, const Launch& launch) {
    records.push_back({name, kernel, launch.grid, launch.block, launch.shared_bytes, {}, {}});
    return (int)records.size() - 1;
}
void record_counts(const Sites& sites) {
    for (const Site& s : sites.all()) {
        auto& to = records.back().counts[{s.pc, s.kind}];
        for (int i = 0; i < COUNTERS; i++) to[i] += s.count[i];
    }
}
void record_events(uint64_t block, std::vector<Event>& events) {
    std::lock_guard<std::mutex> lock(mutex);
    records.back().events[block].swap(events);
}
void record_printed(uint64_t block, const std::string& what) {
    std::lock_guard<std::mutex> lock(mutex);
    if (printed_bytes > PRINTED_LIMIT) return;
    printed[block] += what;
    printed_bytes += what.size();
}
void show_printed() {
    if (printed.empty()) return;
    fflush(stdout);
    for (auto& p : printed) fwrite(p.second.data(), 1, p.second.size(), stdout);
    fflush(stdout);
    printed.clear();
    printed_bytes = 0;
}

void forget_run() {
    records.clear();
    buffers.clear();
    forget_findings();
    last_error = 0;
}

// A line `launch ...` for each launch, followed by its lines `count ...` and `event ...`; addresses as in simt_findings.
std::string records_text() {
    std::string text;
    auto field = [&text](uint64_t v) { text += '\t' + std::to_string(v); };
    for (const Record& r : records) {
        text += "launch\t" + r.text;
        field(r.kernel ? (uintptr_t)r.kernel - module_base : 0);
        for (uint64_t v : {r.grid.x, r.grid.y, r.grid.z, r.block.x, r.block.y, r.block.z}) field(v);
        field(r.shared_bytes);
        text += '\n';
        for (auto& entry : r.counts) {
            if (std::all_of(entry.second.begin(), entry.second.end(), [](uint64_t v) { return v == 0; })) continue;
            text += "count\t" + kind_name(entry.first.second);
            field(in_module(entry.first.first) ? entry.first.first - 1 - module_base : 0);
            for (uint64_t v : entry.second) field(v);
            text += '\n';
        }
        for (auto& of_block : r.events)
            for (const Event& e : of_block.second) {
                text += std::string("event\t") + DID_NAME[e.did];
                field(in_module(e.pc) ? e.pc - 1 - module_base : 0);
                field(of_block.first), field(e.warp);
                for (int64_t v : e.value) text += '\t' + std::to_string(v);
                text += '\n';
            }
    }
    return text;
}

extern "C" {
const char* simt_error_name(int e) {
    switch (e) {
#define SIMT_ERROR_NAME(name, number) \
    case number: return #name;
        SIMT_ERRORS(SIMT_ERROR_NAME)
    default: return "an unknown CUDA error";
    }
}
}

}  // namespace simt
