// Clusters: see cluster.h.
#include "cluster.h"
#include "faults.h"
#include "values.h"

namespace simt {

Cluster::Cluster(int size, int threads) : size(size), member(size) {
    for (Member& m : member) m.pending = threads;
}
int Cluster::live() const {
    return (int)std::count_if(member.begin(), member.end(), [](const Member& m) { return !m.ended; });
}

// ---- turns --------------------------------------------------------------------------------------
static bool over(const Block* block) {
    const Launch* launch = block->launch;
    return cancelled() || launch->stop <= block->last || launch->too_few_workers;
}
// The time is up: somebody had let the other blocks run, and they have not helped it.
static void file_in_vain(Block* block) {
    Lane *const end = block->lane + block->threads,
                *lane = std::find_if(block->lane, end, [](Lane& l) { return l.in_vain && l.state == RUNNABLE; });
    if (lane == end) return;
    file(lane, out_of_time(lane));
    stop_launch(block, cudaErrorLaunchTimeout);
}
static bool wait_for_turn(Block* block) {
    Cluster& c = *block->cluster;
    std::unique_lock<std::mutex> lock(c.mutex);
    block->holds = true;  // nobody waits for it to look at a word
    // Who has the turn passes it on, also when the launch is over, and may use this block's memory until then. Only a
    // block that never begins does not.
    while (c.turn != block->rank && (c.member[c.turn].block || !over(block))) {
        block->worker->in_vain++;
        c.changed.wait_for(lock, std::chrono::milliseconds(10));
    }
    block->holds = false;
    block->ended = over(block);
    if (!block->ended) c.member[block->rank].block = block;
    if (cancelled() && block->in_vain) file_in_vain(block);
    return !block->ended;
}
static void next_turn(Cluster& c) {
    for (int i = 0; i < c.size; i++) {
        c.turn = (c.turn + 1) % c.size;
        if (!c.member[c.turn].ended) break;
    }
    c.changed.notify_all();
}
bool pass_turn(Block* block) {
    Cluster& c = *block->cluster;
    if (c.live() == 1) return true;
    {
        std::lock_guard<std::mutex> lock(c.mutex);
        next_turn(c);
    }
    return wait_for_turn(block);
}

void enter_cluster(Block* block) {
    Launch* launch = block->launch;
    if (launch->cluster == 1) return;
    {
        std::lock_guard<std::mutex> lock(launch->mutex);
        auto& cluster = launch->clusters[block->last];
        if (!cluster) cluster = std::make_shared<Cluster>((int)launch->cluster, block->threads);
        block->cluster = cluster;
    }
    wait_for_turn(block);
}
void leave_cluster(Block* block) {
    if (!block->cluster) return;
    Cluster& c = *block->cluster;
    bool all_left;
    {
        std::lock_guard<std::mutex> lock(c.mutex);
        c.member[block->rank].ended = true, c.member[block->rank].block = nullptr;
        if (c.turn == block->rank) next_turn(c);
        all_left = ++c.left == c.size;
    }
    if (all_left) {
        std::lock_guard<std::mutex> lock(block->launch->mutex);
        block->launch->clusters.erase(block->last);
    }
    block->cluster.reset();
}
static bool somebody_waits(const Block& block) {
    return std::any_of(block.lane, block.lane + block.threads, [](const Lane& l) { return l.state == IN_CLUSTER; });
}
bool wait_for_cluster(Block* block) {
    if (!somebody_waits(*block)) return false;
    if (++block->cluster->idle >= block->cluster->live()) return false;
    pass_turn(block);
    return true;
}

// ---- the barrier --------------------------------------------------------------------------------
static Cluster& cluster_of(Block* block) {  // of a launch without clusters, each block is one
    if (!block->cluster) {
        block->cluster = std::make_shared<Cluster>(1, block->alive);
        block->cluster->member[0].block = block;
    }
    return *block->cluster;
}
void Cluster::end_phase_if_all_have_arrived() {
    for (const Member& m : member)
        if (m.pending) return;
    for (Member& m : member) {
        m.pending = m.block ? m.block->alive : 0;
        m.released[(phase + 1) % 3] = m.released[phase % 3];  // what was released stays so
    }
    phase++;
}
bool pass_cluster_waits(Block* block) {
    if (!block->cluster) return false;
    const Cluster& c = *block->cluster;
    uint32_t learnt = 0;  // warps
    bool any = false;
    for (int t = 0; t < block->threads; t++) {
        Lane& lane = block->lane[t];
        if (lane.state != IN_CLUSTER || lane.cluster_waits == c.phase) continue;
        any = true;
        if (!(learnt >> lane.warp->index & 1)) {
            learnt |= 1u << lane.warp->index;
            acquire(lane.warp, c.member[block->rank].released[lane.cluster_waits % 3]);
            lane.warp->known[CLUSTER_CLOCK] = lane.cluster_waits + 1;
            lane.warp->time++;
            count_incomplete(lane.warp);
        }
        lane.cluster_waits++;
        make_runnable(&lane);
    }
    return any;
}
void leave_cluster_barrier(Lane* me) {
    if (!me->block->cluster) return;
    Cluster& c = *me->block->cluster;
    if (me->cluster_arrivals == c.phase) c.member[me->block->rank].pending--;
    c.end_phase_if_all_have_arrived();
}
static bool missing(const Cluster::Member& m) { return m.block && m.pending; }
// For Python, where somebody in the block waits at the cluster barrier: block and missing threads, of those that it
// waits for.
std::string waits_in_cluster(const Block& block) {
    std::string text;
    if (!somebody_waits(block)) return text;
    for (const Cluster::Member& m : block.cluster->member)
        if (missing(m))
            text += (text.empty() ? "" : ";") + std::to_string(m.block->number) + ',' + std::to_string(m.pending);
    return text;
}
Block* missing_in_cluster(Block* block) {
    if (waits_in_cluster(*block).empty()) return block;
    return std::find_if(block->cluster->member.begin(), block->cluster->member.end(), missing)->block;
}

// ---- each other's memory ------------------------------------------------------------------------
constexpr int RANK_SHIFT = 24;  // of an address that cluster_address has made: the rank + 1; 0: it was not made there
constexpr uint32_t NO_RANK = 255;

// How often a thread has waited at the cluster barrier that what `lane` does now comes after.
static uint32_t waits_known(const Lane* lane) { return lane->warp->known[CLUSTER_CLOCK]; }
// Did it happen before what `lane` does now?
static bool ordered(const RemoteAccess& a, const Lane* lane) {
    if (!a.pc) return true;
    if (a.rank == lane->block->rank) return before((uint64_t)a.thread, a.time, lane);
    const auto& relaxed = lane->block->cluster->member[a.rank].relaxed;
    for (uint32_t phase = a.arrivals; phase < waits_known(lane); phase++)
        if (phase >= relaxed.size() || !(relaxed[phase] >> a.thread / WARP & 1)) return true;
    return false;
}
// The access from another block is told of, and what it meets.
static void file_race(Lane* lane, const Block* owner, const RemoteAccess& mine, const RemoteAccess& other) {
    file(lane, {"race", mine.how, other.how, {(int64_t)owner->number, owner->rank}, mine.pc, other.pc, other.thread,
                mine.thread, 0, mine.block, 0, 1, (int64_t)other.block});
}
static RemoteAccess access_of(const Lane* lane, const char* how, uintptr_t pc) {
    const Block* b = lane->block;
    return {pc, how, b->number, b->rank, lane->id, lane->warp->time, lane->cluster_arrivals};
}

bool SharedShadow::meets_remote(Lane* lane, const Block* owner, uint64_t address, int bytes, bool writes,
                                const char* how, uintptr_t pc) {
    bool filed = false;
    for (uint64_t word = address / 4; word <= (address + bytes - 1) / 4; word++) {
        const auto found = remote.find((uint32_t)word);
        if (found == remote.end()) continue;
        const RemoteAccess now = access_of(lane, how, pc);
        for (const RemoteAccess* a : {&found->second.write, &found->second.read[0], &found->second.read[1]}) {
            if (filed || (!writes && a != &found->second.write) || ordered(*a, lane)) continue;
            filed = true;
            if (owner == lane->block) file_race(lane, owner, *a, now);
            else file_race(lane, owner, now, *a);
        }
        if (writes && word * 4 >= address && word * 4 + 4 <= address + bytes) remote.erase(found);
    }
    return filed;
}
void SharedShadow::touch_remotely(Lane* lane, const Block* owner, uint64_t address, int bytes, bool writes,
                                  const char* how) {
    const auto& seen = lane->block->cluster->member[owner->rank].released[(waits_known(lane) - 1) % 3].known;
    const RemoteAccess now = access_of(lane, how, lane->pc);
    bool filed = meets_remote(lane, owner, address, bytes, writes, how, lane->pc);
    auto unseen = [&](const Stamp& s, int clock) { return s.time > seen[clock]; };
    for (uint64_t c = address / 2; c < (address + bytes) / 2; c++) {  // these accesses are aligned
        Cell& cell = cells[c];
        const Stamp* met = nullptr;
        if (writes)
            for (const Stamp& r : cell.read)
                if (unseen(r, r.thread / WARP)) met = &r;
        if (cell.copying || unseen(cell.write, cell.async ? cell.fences : cell.write.thread / WARP)) met = &cell.write;
        if (met && !filed) {
            const Sites& sites = *owner->worker->sites;
            file_race(lane, owner, now,
                      {sites.all()[met->site].pc, verb(sites, *met, met == &cell.write), owner->number, owner->rank,
                       (int)met->thread, 0, 0});
            filed = true;
        } else if (!writes && cell.full != 3 && !filed) {
            file(lane, {"uninitialised-shared", how, "remote", {(int64_t)address, bytes, (int64_t)owner->number}});
            filed = true;
        }
        if (writes) cell = Cell(), cell.full = 3;
    }
    for (uint64_t word = address / 4; word < (address + bytes) / 4; word++) {
        RemoteWord& w = remote[(uint32_t)word];
        if (writes) w = {now, {}};
        else w.read[w.read[0].pc && w.read[0].rank != now.rank] = now;  // two blocks are enough: see keep_two
    }
}

void file_cluster_end(Block* block) {
    if (!block->cluster || block->cluster->size == 1) return;
    const RemoteAccess& last = block->cluster->member[block->rank].last;
    const auto waited = [&last](const Warp& w) { return w.known[CLUSTER_CLOCK] > last.arrivals; };
    if (!last.pc || std::any_of(block->warp, block->warp + block->warps, waited)) return;
    file(block->lane, {"cluster-end", last.how, "", {(int64_t)block->number, block->rank}, last.pc, 0, -1, last.thread,
                       0, last.block, 0, 1, (int64_t)block->number});
    stop_launch(block, cudaErrorIllegalAddress);
}

// Where the bytes are, once all is as it should be.
static uint8_t* reach(Lane* me, uint32_t address, int bytes, bool writes) {
    Block* block = me->block;
    const uint32_t at = address & ((1u << RANK_SHIFT) - 1);
    const int rank = address >> RANK_SHIFT ? (int)(address >> RANK_SHIFT) - 1 : block->rank;
    const bool own = rank == block->rank;
    const char* how = writes ? own ? "store" : "cluster_store" : own ? "load" : "cluster_load";
    Cluster& c = cluster_of(block);
    if (rank >= c.size) file_fatal(me, {"cluster-rank", how, "", {rank, c.size}}, cudaErrorIllegalAddress);
    if (at % bytes) file_fatal(me, {"misaligned", how, "shared", {at, bytes}}, cudaErrorMisalignedAddress);
    Cluster::Member& m = c.member[rank];
    const int64_t number = (int64_t)block->number - block->rank + rank;
    if (!own && !waits_known(me))
        file_fatal(me, {"cluster-begin", how, "", {number, rank}}, cudaErrorIllegalAddress);
    if (!m.block) file_fatal(me, {"cluster-end", how, "", {number, rank}}, cudaErrorIllegalAddress);
    Worker* owner = m.block->worker;
    if (!owner->shadow->in_bounds(me, at, bytes, how)) end_launch(me, cudaErrorIllegalAddress);
    const int site = block->worker->sites->find(me->pc, writes ? CLUSTER_STORE : CLUSTER_LOAD);
    if (block->launch->checked) {
        if (own) owner->shadow->touch(me, at, bytes, writes ? WRITE : READ, site, how, nullptr);
        else owner->shadow->touch_remotely(me, m.block, at, bytes, writes, how);
    }
    if (!own && me->cluster_arrivals > m.last.arrivals) m.last = access_of(me, how, me->pc);
    count_access(me, site, at, bytes);
    return (uint8_t*)owner->window.base + at;
}

// ---- what the kernel calls ----------------------------------------------------------------------
extern "C" {
uint32_t cluster_rank() { return (uint32_t)kernel_lane(CALLER)->block->rank; }
uint32_t cluster_size() { return kernel_lane(CALLER)->block->launch->cluster; }
void simt_cluster_arrive(int release_too) {
    ENTER_FROM_KERNEL(me);
    Cluster& c = cluster_of(me->block);
    Cluster::Member& m = c.member[me->block->rank];
    if (me->cluster_arrivals > me->cluster_waits) file_fatal(me, {"cluster-barrier", "cluster_arrive"});
    me->cluster_arrivals++;
    m.pending--;
    if (release_too) {
        release(me, m.released[c.phase % 3]);
    } else {
        if (m.relaxed.size() <= c.phase) m.relaxed.resize(c.phase + 1);
        m.relaxed[c.phase] |= 1u << me->warp->index;
    }
    c.end_phase_if_all_have_arrived();
    go_on_after_release(me);
}
void cluster_wait() {
    ENTER_FROM_KERNEL(me);
    if (me->cluster_arrivals == me->cluster_waits) file_fatal(me, {"cluster-barrier", "cluster_wait"});
    wait_for_others(me, IN_CLUSTER);
}
uint32_t cluster_address(uint32_t shared_address, uint32_t rank) {
    return (shared_address & ((1u << RANK_SHIFT) - 1)) | (rank < NO_RANK ? rank + 1 : NO_RANK) << RANK_SHIFT;
}
void simt_cluster_store(uint32_t address, const void* from, int bytes) {
    ENTER_FROM_KERNEL(me);
    if (never_set(from, bytes)) file_never_set(me, "store");
    memcpy(reach(me, address, bytes, true), from, (size_t)bytes);
}
void simt_cluster_load(uint32_t address, void* to, int bytes) {
    ENTER_FROM_KERNEL(me);
    memcpy(to, reach(me, address, bytes, false), (size_t)bytes);
}
}

}  // namespace simt
