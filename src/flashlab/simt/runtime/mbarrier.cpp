// mbarriers: see mbarrier.h.
#include "mbarrier.h"
#include "clocks.h"
#include "events.h"
#include "proxy.h"
#include "shadow.h"

namespace simt {

void Mbarriers::begin_block() {
    all.clear();
    clocks.clear();
    passing.clear();
}
Mbarrier* Mbarriers::find(uint32_t address) {
    const auto it = all.find(address);
    return it == all.end() ? nullptr : &it->second;
}
void Mbarriers::make(Lane* me, uint32_t address, int count) {
    Block* block = me->block;
    auto known = clocks.find(address);
    if (known == clocks.end()) {  // beyond so many, several share one
        const int room = CLUSTER_CLOCK - block->warps, clock = block->warps + (int)clocks.size() % room;
        block->clocks = std::max(block->clocks, clock + 1);
        known = clocks.emplace(address, std::make_pair(clock, 0u)).first;
    }
    Mbarrier& bar = all[address];
    bar = Mbarrier();
    bar.address = address, bar.count = bar.pending = count;
    bar.clock = known->second.first;
    bar.init_pc = me->pc;
    bar.init.time = me->warp->time, bar.init.thread = (uint64_t)me->id;
    bar.init_fences = fences_of(me, SHARED);
}
void Mbarriers::end(uint32_t address) { all.erase(address); }

void Mbarriers::end_phase(Block* block, Mbarrier& bar) {
    if (!bar.loads.empty()) {
        const uint32_t time = ++clocks[bar.address].second;
        for (const BulkCopy& load : bar.loads) land(block, load, bar.clock, time);
        bar.arrived.known[bar.clock] = time;
        bar.loads.clear();
    }
    join(bar.passed, bar.arrived, block);
    bar.arrived = Clock();
    bar.phase++;
    bar.pending = bar.count;
    bar.expected = bar.brought = bar.warps = 0;
    memset(bar.looked, 0, sizeof bar.looked);
    for (Lane* lane : bar.waiting) {
        acquire(lane->warp, bar.passed);
        lane->phase_wait.over = true;
    }
    passing.insert(passing.end(), bar.waiting.begin(), bar.waiting.end());
    bar.waiting.clear();
}
bool Mbarriers::pass_waits(Block* block) {
    for (auto& entry : all)
        if (!entry.second.waiting.empty() && entry.second.has_all()) end_phase(block, entry.second);
    if (passing.empty()) return false;
    for (Lane* lane : passing) {
        Mbarrier* bar = lane->phase_wait.over ? nullptr : find(lane->phase_wait.bar);
        if (bar) acquire(lane->warp, bar->passed);
        make_runnable(lane);
    }
    passing.clear();
    return true;
}

void Mbarriers::file_unwaited(Block* block) {
    for (auto& entry : all) {
        if (entry.second.loads.empty()) continue;
        const BulkCopy& load = entry.second.loads[0];
        file(&block->lane[load.thread], {"never-waited", load.how, "", {}, (*block->worker->sites)[load.site].pc});
        return;
    }
}

// ---- what the kernel calls ----------------------------------------------------------------------
static Mbarriers& mbarriers(Lane* me) { return *me->block->worker->mbarriers; }

[[noreturn]] static void wrong_number(Lane* me, const char* how, const char* what, int64_t value, int64_t limit) {
    file_fatal(me, {"mbarrier-number", how, what, {value, limit}});
}
// A finding about this mbarrier: its init is the other line.
static Finding about(const Mbarrier& bar, const char* kind, const char* how, uint32_t address, int64_t first = 0,
                     int64_t second = 0) {
    return {kind, how, "", {first, second, address}, 0, bar.init_pc, (int)bar.init.thread};
}

Mbarrier& mbarrier_at(Lane* me, uint32_t address, const char* how) {
    Mbarrier* bar = mbarriers(me).find(address);
    if (!bar) file_fatal(me, {"mbarrier-missing", how, "", {address, 8}});
    if (!bar->told && !before(bar->init.thread, bar->init.time, me)) {
        bar->told = true;
        file(me, about(*bar, "mbarrier-too-early", how, address));
    }
    return *bar;
}

static Mbarrier& to_wait_for(Lane* me, uint32_t address, uint32_t parity, const char* how) {
    if (parity > 1) wrong_number(me, how, "parity", parity, 1);
    return mbarrier_at(me, address, how);
}

static void expect(Lane* me, Mbarrier& bar, uint32_t bytes, const char* how) {
    if (bar.expected + bytes > MAX_TX) wrong_number(me, how, "bytes", bar.expected + bytes, MAX_TX);
    bar.expected += bytes;
}
// The phase has its arrivals: its copies may not bring more than was announced.
static void check_bytes(Lane* me, const Mbarrier& bar, uint32_t address, const char* how) {
    if (bar.pending || bar.brought <= bar.expected) return;
    file_fatal(me, about(bar, "mbarrier-bytes", how, address, bar.expected, bar.brought));
}
static void arrive(Lane* me, uint32_t address, const char* how, int64_t bytes) {
    Worker* worker = me->block->worker;
    Mbarrier& bar = mbarrier_at(me, address, how);
    count_access(me, worker->sites->find(me->pc, MBARRIER_ARRIVE), NO_ADDRESS, 0);
    const bool again = bar.count < WARP && bar.last.in_step(me);  // more arrivals of one instruction than a phase takes
    if (!bar.pending || again)
        file_fatal(me, about(bar, "mbarrier-arrivals", how, address, bar.count, again ? -1 : bar.expected));
    if (bytes) expect(me, bar, (uint32_t)bytes, how);
    const int warp = me->warp->index;
    if (!(bar.warps >> warp & 1)) bar.first[warp] = (uint8_t)me->lane;
    bar.warps |= 1u << warp;
    if (bar.first[warp] == me->lane) note(me->warp, DID_ARRIVE, me->pc, address, bytes);  // once for a warp in step
    release(me, bar.arrived);
    bar.pending--;
    check_bytes(me, bar, address, how);
    if (bar.loads.empty() && bar.has_all()) {
        mbarriers(me).end_phase(me->block, bar);
        bar.last = {me, me->pc, me->calls};
    }
    me->warp->time++;
    worker->shadow->still_loading(me->warp);
    if (!bytes) let_others_run(me);  // else it goes on at once, and issues the copies that it has announced
}
void add_load(Lane* me, Mbarrier& bar, uint32_t address, const BulkCopy& load) {
    const bool fenced = bar.init_fenced && before(bar.init.thread, bar.init_fenced, me);
    if (me->block->launch->checked && !fenced && before(bar.init.thread, bar.init.time, me) &&
        !visible_to_async(me, SHARED, bar.init.thread, bar.init.time, bar.init_fences))
        file(me, about(bar, "mbarrier-fence", load.how, address));
    bar.brought += load.bytes;
    bar.loads.push_back(load);
    check_bytes(me, bar, address, load.how);
}

extern "C" {
void mbarrier_init(uint32_t bar, int arrivals) {
    ENTER_FROM_KERNEL(me);
    Worker* worker = me->block->worker;
    if (bar % 8)
        file_fatal(me, {"bulk-misaligned", "mbarrier_init", "mbarrier", {bar % 8, 8, bar}}, cudaErrorMisalignedAddress);
    if (!worker->shadow->in_bounds(me, bar, 8, "mbarrier_init")) end_launch(me, cudaErrorIllegalAddress);
    if (arrivals < 1 || arrivals > MAX_TX) wrong_number(me, "mbarrier_init", "arrivals", arrivals, MAX_TX);
    if (const Mbarrier* there = mbarriers(me).find(bar))
        file_fatal(me, about(*there, "mbarrier-again", "mbarrier_init", bar));
    if (me->block->launch->checked) worker->shadow->make_mbarrier(me, bar, worker->sites->find(me->pc, MBARRIER_INIT));
    mbarriers(me).make(me, bar, arrivals);
}
void mbarrier_inval(uint32_t bar) {
    ENTER_FROM_KERNEL(me);
    const Mbarrier& there = mbarrier_at(me, bar, "mbarrier_inval");
    const size_t loads = there.loads.size(), waiting = there.waiting.size();
    if (loads || waiting)
        file_fatal(me, about(there, "mbarrier-in-use", "mbarrier_inval", bar, (int64_t)loads, (int64_t)waiting));
    if (me->block->launch->checked) me->block->worker->shadow->end_mbarrier(bar);
    mbarriers(me).end(bar);
}
void mbarrier_arrive(uint32_t bar) {
    ENTER_FROM_KERNEL(me);
    arrive(me, bar, "mbarrier_arrive", 0);
}
void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
    ENTER_FROM_KERNEL(me);
    arrive(me, bar, "mbarrier_arrive_expect_tx", bytes);
}
void mbarrier_expect_tx(uint32_t address, uint32_t bytes) {
    ENTER_FROM_KERNEL(me);
    expect(me, mbarrier_at(me, address, "mbarrier_expect_tx"), bytes, "mbarrier_expect_tx");
}
void fence_mbarrier_init() {
    ENTER_FROM_KERNEL(me);
    for (auto& entry : mbarriers(me).all) {
        Mbarrier& bar = entry.second;
        if (bar.init.thread == (uint64_t)me->id && !bar.init_fenced) bar.init_fenced = me->warp->time;
    }
}
bool mbarrier_test_wait(uint32_t address, uint32_t parity) {
    ENTER_FROM_KERNEL(me);
    const bool no = to_wait_for(me, address, parity, "mbarrier_test_wait").gives_up(me, parity);
    count_access(me, me->block->worker->sites->find(me->pc, MBARRIER_WAIT), NO_ADDRESS, 0);
    const uintptr_t pc = me->pc;
    let_others_run(me);
    me->pc = pc;
    if (no) return 0;
    Mbarrier& bar = mbarrier_at(me, address, "mbarrier_test_wait");
    if ((bar.phase & 1) == parity && bar.has_all()) mbarriers(me).end_phase(me->block, bar);
    if ((bar.phase & 1) == parity) return 0;
    acquire(me->warp, bar.passed);
    return 1;
}
int simt_mbarrier_wait(uint32_t address, uint32_t parity, int may_give_up) {
    ENTER_FROM_KERNEL(me);
    Mbarrier& bar = to_wait_for(me, address, parity, may_give_up ? "mbarrier_try_wait" : "mbarrier_wait");
    const int site = me->block->worker->sites->find(me->pc, MBARRIER_WAIT);
    count_access(me, site, NO_ADDRESS, 0);
    if (may_give_up && bar.gives_up(me, parity)) {
        let_others_run(me);
        return 0;
    }
    const bool under_way = (bar.phase & 1) == parity;
    auto& queue = under_way ? bar.waiting : mbarriers(me).passing;
    const bool first = queue.empty() || queue.back()->warp != me->warp;  // of its warp
    (*me->block->worker->sites)[site].count[1] += under_way && first;
    queue.push_back(me);
    me->phase_wait = {address, parity};
    if (first) note(me->warp, DID_MBARRIER_BEGIN, me->pc, address, parity);
    wait_for_others(me, IN_MBARRIER);
    if (first) note(me->warp, DID_MBARRIER_END, me->pc, address, parity);
    return 1;
}
}

}  // namespace simt
