// Bounds of global memory: see global_memory.h.
#include "global_memory.h"
#include <link.h>
#include <algorithm>

namespace simt {

std::vector<Buffer> buffers;
uintptr_t module_base;
char* (*dynamic_shared)();
typedef std::vector<std::pair<uintptr_t, uintptr_t>> Ranges;
static Ranges module_segments, other_segments, written_segments;
Ranges module_variables() { return written_segments; }

void find_module() {
    module_segments.clear();
    other_segments.clear();
    written_segments.clear();
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void*) {
            Ranges segments, writable;
            bool mine = false;
            for (int i = 0; i < info->dlpi_phnum; i++) {
                if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
                uintptr_t low = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr, high = low + info->dlpi_phdr[i].p_memsz;
                segments.push_back({low, high});
                if (info->dlpi_phdr[i].p_flags & PF_W) writable.push_back({low, high});
                mine |= (uintptr_t)dynamic_shared >= low && (uintptr_t)dynamic_shared < high;
            }
            if (mine) module_base = info->dlpi_addr, written_segments = writable;
            auto& list = mine ? module_segments : other_segments;
            list.insert(list.end(), segments.begin(), segments.end());
            return 0;
        },
        nullptr);
}
static bool in_one_of(const Ranges& segments, uintptr_t a) {
    return std::any_of(segments.begin(), segments.end(), [a](auto& s) { return a >= s.first && a < s.second; });
}
bool in_module(uintptr_t a) { return in_one_of(module_segments, a); }

void describe_address(Finding& f, uintptr_t a, int bytes) {
    f.value[0] = -1, f.value[1] = bytes;
    if (a - stacks_low < stacks_bytes) {
        f.text = "local memory of another thread";
        return;
    }
    uintptr_t nearest = ~(uintptr_t)0;  // the buffer that it misses by the least
    for (const Buffer& b : buffers) {
        const uintptr_t miss = a < b.low ? b.low - a : a + bytes > b.high ? a - b.high + 1 : 0;
        if (miss < nearest) nearest = miss, f.value[0] = b.number, f.value[2] = (int64_t)(a - b.low);
    }
    f.text = a < 65536 ? "null" : nearest < (1u << 26) ? "near" : "wild";
}

bool check_global(Lane* lane, uintptr_t a, int bytes, bool write, const char* how) {
    const Buffer* read_only = nullptr;
    for (const Buffer& b : buffers)
        if (a >= b.low && a + bytes <= b.high) {
            if (!write || b.writable) return true;
            read_only = &b;  // but the same bytes may be another argument's too
        }
    if (read_only) {
        file(lane, {"read-only", how, "", {read_only->number, bytes, (int64_t)(a - read_only->low)}});
        return true;
    }
    const Launch* launch = lane->block->launch;
    if (!write && a >= (uintptr_t)launch->closure && a + bytes <= (uintptr_t)launch->closure + launch->closure_bytes)
        return false;                                 // a kernel parameter: the constant bank
    // __constant__, __device__ variables, tables, stdout
    if (in_module(a) || in_one_of(other_segments, a)) return false;
    Finding f{"global-out-of-bounds", how};
    describe_address(f, a, bytes);
    file_fatal(lane, f, cudaErrorIllegalAddress);
}

}  // namespace simt
