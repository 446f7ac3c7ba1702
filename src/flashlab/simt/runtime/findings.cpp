// The list of findings: see findings.h.
#include "findings.h"
#include "global_memory.h"
#include <map>
#include <algorithm>
#include <tuple>

namespace simt {

std::atomic<int> last_error{0};
typedef std::tuple<std::string, uintptr_t, uintptr_t, bool> Key;
static std::mutex mutex;
static std::map<Key, Finding> findings;
static uint64_t sequence;

// The lower, the better an example.
static auto rank(const Finding& f) {
    const bool within_a_warp = f.other_thread >= 0 && f.other_block < 0 && f.thread / WARP == f.other_thread / WARP;
    const uint64_t later = f.other_block < 0 ? f.block : std::max(f.block, (uint64_t)f.other_block);
    return std::make_tuple(f.warning, f.other_block >= 0, within_a_warp, f.launch, later, f.block, f.thread);
}
static void keep(Finding f) {
    std::lock_guard<std::mutex> lock(mutex);
    f.sequence = sequence++;
    Key key{f.kind, f.pc, f.other_pc, f.other_block >= 0};
    auto it = findings.find(key);
    if (it == findings.end()) {
        findings.emplace(key, f);
        return;
    }
    // How often two blocks meet is a matter of luck.
    const uint64_t times = it->second.times + (f.other_block < 0);
    if (rank(f) < rank(it->second)) {
        if (f.block == it->second.block) f.sequence = it->second.sequence;
        it->second = f;
    }
    it->second.times = times;
}
void file(Lane* lane, const Finding& finding) {
    Finding f = finding;
    if (!f.pc) f.pc = lane->pc;
    if (f.other_block < 0) {
        if (f.thread < 0) f.thread = lane->id;
        f.block = lane->block->number;
    }
    f.launch = lane->block->launch->number;
    keep(f);
}
void file_fatal(Lane* lane, const Finding& f, int error) {
    file(lane, f);
    end_launch(lane, error);
}
void file_misaligned(Lane* lane, uintptr_t address, int bytes, const char* how) {
    const SharedWindow& window = lane->block->worker->window;
    const bool shared = address - window.low < window.high - window.low;
    file_fatal(lane,
               {"misaligned",
                how,
                shared ? "shared" : "global",
                {(int64_t)(shared ? address - window.base : address % 256), bytes}},
               cudaErrorMisalignedAddress);
}
void file_of_launch(int launch, const Finding& finding, int error) {
    Finding f = finding;
    f.launch = launch;
    keep(f);
    int none = 0;
    last_error.compare_exchange_strong(none, error);
}

// ---- for Python ---------------------------------------------------------------------------------
void forget_findings() {
    std::lock_guard<std::mutex> lock(mutex);
    findings.clear();
    sequence = 0;
}
// One finding a line, fields separated by tabs; addresses are relative to the module and lie inside the
// instruction (a return address is the next one's).
std::string findings_text() {
    std::lock_guard<std::mutex> lock(mutex);
    std::string text;
    auto relative = [](uintptr_t pc) {
        return pc && in_module(pc) ? std::to_string(pc - 1 - module_base) : std::string("0");
    };
    for (auto& entry : findings) {
        const Finding& f = entry.second;
        text += std::string(f.kind) + '\t' + f.how + '\t' + relative(f.pc) + '\t' + relative(f.other_pc);
        for (int64_t v : {(int64_t)f.thread, (int64_t)f.other_thread, (int64_t)f.launch, (int64_t)f.block,
                          (int64_t)f.sequence, (int64_t)f.times, f.value[0], f.value[1], f.value[2]})
            text += '\t' + std::to_string(v);
        std::string words = f.text;
        for (char& c : words)
            if (c == '\t' || c == '\n') c = ' ';
        text += '\t' + words + '\t' + std::to_string(f.other_block) + '\t' + (f.warning ? "1" : "0") + '\n';
    }
    return text;
}

}  // namespace simt
