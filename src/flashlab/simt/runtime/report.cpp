// The record of the launches, and the C functions through which Python sets up a run and reads what came of
// it.
#include "report.h"
#include "findings.h"
#include "global_memory.h"
#include "shadow.h"
#include <algorithm>
#include <array>
#include <map>
#include <mutex>

namespace simt {

struct Record {
    std::string text;
    const void* kernel;
    dim3 grid, block;
    size_t shared_bytes;
    std::map<std::pair<uintptr_t, int>, std::array<uint64_t, COUNTERS>> counts;  // by place and kind
    std::map<uint64_t, std::string> printed;                                     // by block
};
static std::vector<Record> records;
static std::mutex mutex;
static std::string text;

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
void record_printed(int launch, uint64_t block, const std::string& what) {
    std::lock_guard<std::mutex> lock(mutex);
    records[launch].printed[block] += what;
}

extern "C" {
void simt_forget_findings();

void simt_reset(int threads, size_t shared_limit, int multiprocessors, int capability) {
    records.clear();
    buffers.clear();
    simt_forget_findings();
    simt_last_error(1);
    settings = {threads, shared_limit, multiprocessors, capability};
}
void simt_buffer(uintptr_t low, size_t bytes, int writable, int number) {
    buffers.push_back({low, low + bytes, writable != 0, number});
}
void simt_static_array(uint64_t offset, uint64_t bytes) { static_arrays.push_back({offset, bytes}); }

// A line `launch ...` for each launch, followed by its lines `count ...`; addresses as in simt_findings.
const char* simt_records() {
    text.clear();
    auto field = [](uint64_t v) { text += '\t' + std::to_string(v); };
    for (const Record& r : records) {
        text += "launch\t" + r.text;
        field(r.kernel ? (uintptr_t)r.kernel - module_base : 0);
        for (uint64_t v : {r.grid.x, r.grid.y, r.grid.z, r.block.x, r.block.y, r.block.z}) field(v);
        field(r.shared_bytes);
        text += '\n';
        for (auto& entry : r.counts) {
            if (std::all_of(entry.second.begin(), entry.second.end(), [](uint64_t v) { return v == 0; }))
                continue;
            text += std::string("count\t") + KIND_NAME[entry.first.second];
            field(in_module(entry.first.first) ? entry.first.first - 1 - module_base : 0);
            for (uint64_t v : entry.second) field(v);
            text += '\n';
        }
    }
    return text.c_str();
}
const char* simt_printed() {  // in the order of the launches and of their blocks
    text.clear();
    for (const Record& r : records)
        for (auto& p : r.printed) text += p.second;
    return text.c_str();
}
const char* simt_fiber_kind() { return fiber_kind(); }

const char* simt_error_name(int e) {
    switch (e) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorLaunchTimeout: return "cudaErrorLaunchTimeout";
    case cudaErrorAssert: return "cudaErrorAssert";
    case cudaErrorMisalignedAddress: return "cudaErrorMisalignedAddress";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    default: return "an unknown CUDA error";
    }
}
}

}  // namespace simt
