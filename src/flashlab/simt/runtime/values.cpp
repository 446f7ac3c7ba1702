// Pending stores: see values.h.
#include "values.h"
#include "global_shadow.h"

namespace simt {

void file_never_set(Lane* lane, const char* how, uintptr_t pc) { file(lane, {"uninitialised-local", how, "", {}, pc}); }

void file_conflict(Lane* lane, const Conflict& c, uintptr_t pc, bool warning) {
    Finding f{c.kind, c.how};
    f.pc = pc, f.thread = lane->id, f.block = lane->block->number;
    f.other_pc = c.other_pc, f.other_thread = c.other_thread;
    f.text = c.other_how;
    f.warning = warning;
    for (int i = 0; i < 3; i++) f.value[i] = c.value[i];
    if (c.other_block >= 0 && strcmp(c.kind, "acquire-missing")) {
        // Which block came first is a matter of luck: the one that writes is told of, or the later line, or block.
        const bool i_read = strstr(c.how, "load") || !strcmp(c.how, "cp.async");
        f.other_block = c.other_block;
        const bool earlier = f.pc != f.other_pc ? f.pc < f.other_pc : f.block < (uint64_t)c.other_block;
        if (i_read || (strcmp(c.other_how, "load") && earlier)) {
            std::swap(f.pc, f.other_pc);
            std::swap(f.thread, f.other_thread);
            f.block = (uint64_t)c.other_block, f.other_block = (int64_t)lane->block->number;
            f.how = c.other_how, f.text = c.how;
        }
    }
    file(lane, f);
}

void expect_store(Lane* lane, uintptr_t address, int bytes, const Conflict* conflict, bool watched) {
    PendingStore& s = lane->store;
    s.address = address, s.pc = lane->pc, s.bytes = bytes;
    s.has_conflict = conflict != nullptr, s.load_came = false, s.watched = watched;
    if (conflict) s.conflict = *conflict;
    if (conflict || watched) memcpy(s.before, (const void*)address, (size_t)bytes);
}

void settle_store(Lane* lane) {
    PendingStore s = lane->store;
    lane->store.bytes = 0;
    if (s.bytes < 0) {
        const auto load = lane->volatile_loads.find(s.address);
        if (load != lane->volatile_loads.end()) load->second.known = known_of_word(lane, s.address);
        return meet(lane, s.address, true, false);
    }
    Conflict& c = s.conflict;
    bool same = s.has_conflict && !memcmp((const void*)s.address, s.before, (size_t)s.bytes);
    if (s.watched && global_shadow.changed(s.address, s.bytes, s.before)) same &= c.other_block < 0;
    const bool unset = never_set((const void*)s.address, s.bytes);
    global_shadow.let_go(lane->block->worker);
    if (unset) file_never_set(lane, "store", s.pc);
    if (!s.has_conflict) return;
    if (same && c.same_warp && c.other_pc == s.pc) return;  // CUDA: one of them takes effect
    if (!same && c.same_instruction) c.kind = "lanes-disagree";
    file_conflict(lane, c, s.pc, same || c.same_instruction);
}

}  // namespace simt
