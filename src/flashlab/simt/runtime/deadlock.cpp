// The report of a deadlock: who waits, and for what.
#include "cluster.h"
#include "mbarrier.h"
#include "warpgroup.h"

namespace simt {

static int barrier_of(const Lane* lane) {
    for (int id = 1; id < BARRIERS; id++)
        for (const Lane* waiting : lane->block->barriers[id].waiting)
            if (waiting == lane) return id;
    return 0;
}
static const char* waits_in(const Lane* lane) {
    if (lane->state == IN_BARRIER) return barrier_of(lane) ? "named_barrier_sync" : "__syncthreads";
    if (lane->state == IN_MBARRIER) return "mbarrier_wait";
    if (lane->state == IN_WGMMA) return "wgmma_wait";
    if (lane->state == IN_REGISTERS) return "setmaxnreg_inc";
    if (lane->state == IN_CLUSTER) return "cluster_wait";
    for (uint32_t left = lane->warp->slots_used; left; left &= left - 1) {
        const Slot& s = lane->warp->slots[__builtin_ctz(left)];
        if (s.arrived >> lane->lane & 1) return collective_name(s.op, s.param);
    }
    return "a collective";
}

// Those that wait for an mbarrier, for Python: a group for each place, mbarrier and parity, in the order of the
// threads. Of each: the warps (a bit each), where they wait, where the mbarrier was made (@ marks an address in the
// module), its own address, the parity; of the mbarrier the phase under way, arrivals missing, arrivals a phase, bytes
// expected, bytes brought; all 0 where it is one no more.
static std::string waits_for_phases(const Block& block) {
    struct Group {
        uintptr_t pc;
        PhaseWait wait;
        uint32_t warps;
    };
    std::vector<Group> groups;
    for (int t = 0; t < block.threads; t++) {
        const Lane& lane = block.lane[t];
        if (lane.state != IN_MBARRIER) continue;
        const PhaseWait w = lane.phase_wait;
        auto same = [&](const Group& g) { return g.pc == lane.pc && g.wait.bar == w.bar && g.wait.parity == w.parity; };
        auto group = std::find_if(groups.begin(), groups.end(), same);
        if (group == groups.end()) group = groups.insert(groups.end(), {lane.pc, w, 0});
        group->warps |= 1u << t / WARP;
    }
    auto place = [](uintptr_t pc) { return "@" + std::to_string(pc && in_module(pc) ? pc - 1 - module_base : 0); };
    std::string text;
    for (const Group& g : groups) {
        const Mbarrier none{}, *found = block.worker->mbarriers->find(g.wait.bar), &bar = found ? *found : none;
        text += (text.empty() ? "" : ";") + std::to_string(g.warps) + ',' + place(g.pc) + ',' + place(bar.init_pc);
        for (int64_t v : {(int64_t)g.wait.bar, (int64_t)g.wait.parity, (int64_t)bar.phase, (int64_t)bar.pending,
                          (int64_t)bar.count, bar.expected, bar.brought})
            text += ',' + std::to_string(v);
    }
    return text;
}

// The named barriers at which somebody waits or has arrived, for Python: the number, threads that have arrived and that
// it waits for, those that wait there, and their warps, a bit each.
static std::string waits_at_barriers(const Block& block) {
    std::string text;
    for (int id = 1; id < BARRIERS; id++) {
        const Barrier& b = block.barriers[id];
        uint32_t warps = 0;
        for (const Lane* lane : b.waiting) warps |= 1u << lane->warp->index;
        if (!b.arrived) continue;
        text += text.empty() ? "" : ";";
        for (const int64_t v : {(int64_t)id, (int64_t)b.arrived, (int64_t)b.expected,
                              (int64_t)b.waiting.size(), (int64_t)warps})
            text += (text.empty() || text.back() == ';' ? "" : ",") + std::to_string(v);
    }
    return text;
}

void file_deadlock(Block& block) {
    if (block.worker->warpgroups->file_deadlock() || file_registers_deadlock(&block))
        return stop_launch(&block, cudaErrorLaunchTimeout);
    Lane* stuck = nullptr;  // the first that waits, and the first that waits elsewhere
    Lane* other = nullptr;
    for (int t = block.threads - 1; t >= 0; t--)
        if (block.lane[t].state != DONE) stuck = &block.lane[t];
    for (int t = block.threads - 1; t >= 0; t--)
        if (block.lane[t].state != DONE && block.lane[t].pc != stuck->pc) other = &block.lane[t];
    Finding f{"deadlock", waits_in(stuck)};
    if (other) f.text = waits_in(other), f.other_pc = other->pc, f.other_thread = other->id;
    f.text += "|" + waits_for_phases(block) + "|" + waits_at_barriers(block) + "|" + waits_in_cluster(block);
    f.value[0] = block.alive, f.value[1] = block.threads;
    file(stuck, f);
    stop_launch(&block, cudaErrorLaunchTimeout);
}

}  // namespace simt
