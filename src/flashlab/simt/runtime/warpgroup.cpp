// The life of a wgmma: issue by four warps, commit, wait, and what must not be touched meanwhile: see warpgroup.h.
#include "warpgroup.h"
#include "descriptor.h"
#include "events.h"
#include "shadow.h"
#include "values.h"
#include <algorithm>

namespace simt {

static int group_of(const Warp* warp) { return warp->index / WARPS_OF_GROUP; }
static int place_in_group(const Warp* warp) { return warp->index % WARPS_OF_GROUP; }

static void bound(Lane& lane) {
    uintptr_t low = ~(uintptr_t)0, high = 0;
    for (const RegistersInUse& r : lane.in_use) low = std::min(low, r.low), high = std::max(high, r.high);
    lane.in_use_low = low, lane.in_use_bytes = high ? high - low : 0;
}

void Warpgroups::begin_block() {
    if (!used) return;
    used = false;
    waiting = 0;
    for (OfWarp& w : of_warp) w = OfWarp();
    for (OfGroup& g : of_group) g = OfGroup();
    std::fill(readers.begin(), readers.end(), 0);
    told.clear();
    worker->shadow->watched = false;
}

// ---- issue --------------------------------------------------------------------------------------
static void file_difference(Lane* lane, const SimtWgmmaIn& x, uintptr_t pc, const Lane* other, const SimtWgmmaIn& y,
                            uintptr_t other_pc) {
    const char* what = !x.a_registers && x.a != y.a ? "descriptor of A"
                       : x.b != y.b                 ? "descriptor of B"
                       : !x.add != !y.add           ? "scale-d"
                                                    : nullptr;
    if (what) file(lane, {"wgmma-differs", "wgmma", what, {}, pc, other_pc, other->id});
}

// The first warp is there: which bytes it reads is known from now on.
void Warpgroups::prepare(Product& p, Warp* warp, const SimtWgmmaIn& in) {
    Block* block = warp->block;
    const bool checked = block->launch->checked, trans_b = p.variant & SIMT_WGMMA_TRANS_B;
    p.a = in.a, p.b = in.b, p.add = in.add;
    if (!in.a_registers) {
        const Descriptor a(p.a);
        p.a_pieces.reserve(128);
        for (int i = 0; i < 128; i++)
            p.a_pieces.push_back(p.variant & SIMT_WGMMA_TRANS_A ? a.mn_major(i % 8, i / 8) : a.k_major(i / 2, i % 2));
    }
    const Descriptor b(p.b);
    p.b_pieces.reserve(2 * p.n);
    for (int i = 0; i < 2 * p.n; i++)
        p.b_pieces.push_back(trans_b ? b.mn_major(i % (p.n / 8), i / (p.n / 8)) : b.k_major(i / 2, i % 2));
    Site& site = (*worker->sites)[p.site];
    site.count[0]++;
    site.count[1] += 2ull * 64 * 16 * p.n;
    site.count[2] += 16 * (p.a_pieces.size() + p.b_pieces.size());
    site.count[3] += in.a_registers != nullptr;

    const size_t pieces = (worker->window.high - worker->window.base) / 16 + 1;
    if (checked && readers.empty()) readers.resize(pieces * MAX_GROUPS);
    worker->shadow->watched |= checked;
    const uint32_t number = (uint32_t)of_warp[warp->index].issued;
    for (auto* of : {&p.a_pieces, &p.b_pieces})
        for (uint32_t& piece : *of)
            if (!worker->shadow->in_bounds(warp->lanes, piece, 16, "wgmma")) piece = NOWHERE;
            else if (checked) readers[piece / 16 * MAX_GROUPS + group_of(warp)] = number;
}

// Another warp of the group comes to it: it has to be the same.
void Warpgroups::compare(Product& p, Warp* warp, const SimtWgmmaIn& in, const Slot& slot) {
    Lane* lane = warp->lanes;
    const Lane* other = warp->block->warp[group_of(warp) * WARPS_OF_GROUP + __builtin_ctz(p.issued)].lanes;
    if (p.variant != slot.param)
        file_fatal(lane, {"wgmma-form", "wgmma", "", {slot.param & 511, p.n}, slot.pc, p.pc, other->id});
    if (p.pc != slot.pc) {  // Python drops it where the line is the same
        file(lane, {"divergent", "wgmma", "wgmma", {}, slot.pc, p.pc, other->id});
    }
    file_difference(lane, in, slot.pc, other, {nullptr, in.a_registers, p.a, p.b, p.add}, p.pc);
}

void Warpgroups::issue(Warp* warp, const Slot& slot) {
    Block* block = warp->block;
    const int group = group_of(warp), first_warp = group * WARPS_OF_GROUP;
    const int here = std::min(block->threads - first_warp * WARP, GROUP_LANES);
    if (here < GROUP_LANES)
        file_fatal(warp->lanes, {"wgmma-block", "wgmma", "", {here, first_warp, block->threads}, slot.pc});
    used = true;
    warp->loading.clear();
    OfWarp& mine = of_warp[warp->index];
    OfGroup& ours = of_group[group];
    const uint64_t number = ++mine.issued;
    const SimtWgmmaIn& in = *(const SimtWgmmaIn*)warp->lanes[0].in;
    if (number > ours.executed + ours.queue.size()) {
        ours.queue.emplace_back();
        Product& p = ours.queue.back();
        p.pc = slot.pc, p.variant = slot.param, p.n = slot.param & 511, p.issued = 0;
        p.site = worker->sites->find(slot.pc, (Kind)(WGMMA_M64N8K16 + p.n / 8 - 1));
        ours.pcs.push_back(slot.pc);
        prepare(p, warp, in);
    } else {
        compare(product(ours, number), warp, in, slot);
    }
    Product& p = product(ours, number);
    const bool checked = block->launch->checked;
    for (int l = 0; l < WARP; l++) {
        Lane& lane = warp->lanes[l];
        const SimtWgmmaIn& its = *(const SimtWgmmaIn*)lane.in;
        file_difference(&lane, its, slot.pc, warp->lanes, in, slot.pc);
        const int at = place_in_group(warp) * WARP + l;
        p.d[at] = its.d;
        if (its.a_registers) memcpy(p.a_registers[at], its.a_registers, sizeof p.a_registers[at]);
        for (int i = 0; i < 4 && its.a_registers; i++)
            if (its.a_registers[i] == NEVER_SET) {
                file_never_set(&lane, "wgmma's A", slot.pc);
                break;
            }
        if (!checked) continue;
        check_fence(warp, l, its, p, number);
        auto use = [&](const void* registers, size_t bytes, bool of_a) {
            const uintptr_t low = (uintptr_t)registers;
            for (RegistersInUse& r : lane.in_use)
                if (r.low == low && r.high == low + bytes && r.of_a == of_a) {
                    r.number = number;
                    return;
                }
            lane.in_use.push_back({low, low + bytes, slot.pc, number, of_a});
        };
        use(its.d, (size_t)p.n / 2 * sizeof(float), false);
        if (its.a_registers) use(its.a_registers, 16, true);
        bound(lane);
    }
    if (checked) check_operands(p, warp);
    note(warp, DID_WGMMA, slot.pc, (int64_t)number, p.n);
    p.issued |= 1 << place_in_group(warp);
}

// What is read must be there: landed, written, ordered before this warp, and visible to the async proxy.
void Warpgroups::check_operands(const Product& p, Warp* warp) {
    for (auto* pieces : {&p.a_pieces, &p.b_pieces}) {
        if (told.empty()) {
            worker->shadow->check_pieces(warp, *pieces, "wgmma", p.pc);
            continue;
        }
        std::vector<uint32_t> others;
        std::copy_if(pieces->begin(), pieces->end(), std::back_inserter(others),
                     [&](uint32_t piece) { return !told.count(piece & ~15u); });
        worker->shadow->check_pieces(warp, others, "wgmma", p.pc);
    }
}

// ---- fence --------------------------------------------------------------------------------------
// Which registers a wgmma will use is known only when it is issued. So the fence looks at those that were given to one
// before: what they hold is what the fence is about, and if they hold something else at the next issue, they have been
// written since. (A register that is written with what it held is not noticed.)
static uint64_t content(uintptr_t address, size_t bytes) {
    uint64_t h = bytes;
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word;
        memcpy(&word, (const void*)(address + i), 8);
        h = (h ^ word) * 0x9e3779b97f4a7c15ull;
        h ^= h >> 29;
    }
    return h;
}

void Warpgroups::fence(Warp* warp) {
    OfWarp& mine = of_warp[warp->index];
    used = mine.fenced = mine.ever_fenced = true;
    if (!warp->block->launch->checked) return;
    for (int l = 0; l < warp->count; l++)
        for (GivenRegisters& g : warp->lanes[l].given)
            if (g.number <= of_group[group_of(warp)].executed) g.content = content(g.address, g.bytes);
}

void Warpgroups::check_fence(Warp* warp, int l, const SimtWgmmaIn& in, const Product& p, uint64_t number) {
    Lane& lane = warp->lanes[l];
    const OfWarp& mine = of_warp[warp->index];
    const uint64_t executed = of_group[group_of(warp)].executed;
    auto check = [&](uintptr_t address, uint32_t bytes, bool of_a) {
        auto it = std::find_if(lane.given.begin(), lane.given.end(),
                               [&](const GivenRegisters& g) { return g.address == address && g.bytes == bytes; });
        // Accumulators that one wgmma hands on to the next need no fence.
        const bool handed_on = it != lane.given.end() && !of_a && it->number > executed;
        const uint64_t now = handed_on ? 0 : content(address, bytes);
        bool fenced = handed_on;
        if (it != lane.given.end()) fenced |= it->content == now;
        else fenced = of_a ? mine.fenced : mine.ever_fenced;
        if (!fenced) file(&lane, {"wgmma-fence", of_a ? "A" : "accumulators", "", {it != lane.given.end()}, p.pc});
        if (it == lane.given.end()) lane.given.push_back({address, bytes, number, now});
        else it->number = number, it->content = handed_on ? it->content : now;
    };
    check((uintptr_t)in.d, (uint32_t)p.n / 2 * sizeof(float), false);
    if (in.a_registers) check((uintptr_t)in.a_registers, 16, true);
}

// ---- commit and wait ----------------------------------------------------------------------------
void Warpgroups::commit(Warp* warp, const Slot& slot) {
    OfWarp& mine = of_warp[warp->index];
    used = true;
    mine.groups.push_back(mine.issued);
    note(warp, DID_COMMIT, slot.pc, (int64_t)mine.issued, (int64_t)mine.groups.size());
}

void Warpgroups::wait(Warp* warp, const Slot& slot) {
    OfWarp& mine = of_warp[warp->index];
    used = true;
    const size_t left = (size_t)slot.param;
    const uint64_t upto = mine.groups.size() > left ? mine.groups[mine.groups.size() - 1 - left] : 0;
    Site& site = (*worker->sites)[worker->sites->find(slot.pc, WGMMA_WAIT)];
    site.count[0]++;
    site.count[1] += upto > mine.completed;
    mine.wait_pc = slot.pc;
    note(warp, DID_WAIT_BEGIN, slot.pc, (int64_t)upto, slot.param);
    if (upto <= mine.completed) {
        note(warp, DID_WAIT_END, slot.pc, (int64_t)upto, slot.param);
        return;
    }
    mine.waiting_for = upto, mine.pending = slot.param;
    waiting++;
}

// Computes what warps wait for, and lets go those that need not wait any longer.
bool Warpgroups::pass_waits() {
    const int before = waiting;
    for (int group = 0; waiting && (group + 1) * WARPS_OF_GROUP <= worker->block.warps; group++) {
        OfGroup& ours = of_group[group];
        uint64_t wanted = 0;
        Warp* first = worker->block.warp + group * WARPS_OF_GROUP;
        for (int w = 0; w < WARPS_OF_GROUP; w++) wanted = std::max(wanted, of_warp[first[w].index].waiting_for);
        while (ours.executed < wanted && ours.queue.front().issued == (1 << WARPS_OF_GROUP) - 1) {
            execute(group, ours.queue.front(), ours.executed + 1);
            ours.executed++;
            ours.queue.pop_front();
        }
        for (int w = 0; w < WARPS_OF_GROUP; w++) {
            const uint64_t its = of_warp[first[w].index].waiting_for;
            if (its && its <= ours.executed) pass(&first[w]);
        }
    }
    return waiting < before;
}

void Warpgroups::pass(Warp* warp) {
    OfWarp& mine = of_warp[warp->index];
    mine.completed = mine.waiting_for;
    mine.waiting_for = 0;
    waiting--;
    mine.fenced = false;
    mine.passed.push_back({++warp->time, mine.completed});  // what the warp has published before does not cover it
    note(warp, DID_WAIT_END, mine.wait_pc, (int64_t)mine.completed, mine.pending);
    for (int l = 0; l < warp->count; l++) {
        Lane& lane = warp->lanes[l];
        auto done = [&](const RegistersInUse& r) { return r.number <= mine.completed; };
        lane.in_use.erase(std::remove_if(lane.in_use.begin(), lane.in_use.end(), done), lane.in_use.end());
        bound(lane);
        if (lane.state == IN_WGMMA) make_runnable(&lane);
    }
}

void Warpgroups::execute(int group, Product& p, uint64_t number) {
    Block* block = &worker->block;
    multiply(p, block, group);
    note(block->warp + group * WARPS_OF_GROUP, DID_EXECUTE, p.pc, (int64_t)number, p.n);
    if (!block->launch->checked) return;
    for (int t = 0; t < GROUP_LANES; t++)  // what the sums hold now needs no fence
        for (GivenRegisters& g : block->lane[group * GROUP_LANES + t].given)
            if (g.address == (uintptr_t)p.d[t] && g.bytes == (uint32_t)p.n / 2 * sizeof(float))
                g.content = content(g.address, g.bytes);
}

bool Warpgroups::file_deadlock() {
    if (!used) return false;
    for (int w = 0; w < worker->block.warps; w++) {
        if (!of_warp[w].waiting_for) continue;
        const int group = w / WARPS_OF_GROUP;
        const Product& p = of_group[group].queue.front();
        bool elsewhere = false;  // a missing warp waits for an mbarrier, or for registers: that is the cause
        for (int i = 0; i < GROUP_LANES; i++)
            if (const State its = worker->lanes[group * GROUP_LANES + i].state; !(p.issued >> i / WARP & 1))
                elsewhere |= its == IN_MBARRIER || its == IN_REGISTERS;
        if (elsewhere) continue;
        file(worker->block.warp[w].lanes,
             {"wgmma-warps", "wgmma_wait", "", {p.issued, group * WARPS_OF_GROUP}, p.pc, of_warp[w].wait_pc, w * WARP});
        return true;
    }
    return false;
}

void Warpgroups::file_never_waited() {
    if (!used) return;
    for (int g = 0; g * WARPS_OF_GROUP < worker->block.warps; g++) {
        if (of_group[g].queue.empty()) continue;
        const Product& p = of_group[g].queue.front();
        Warp* warp = worker->block.warp + g * WARPS_OF_GROUP + __builtin_ctz(p.issued);
        const OfWarp& its = of_warp[warp->index];
        const bool all = p.issued == (1 << WARPS_OF_GROUP) - 1;
        Finding f{all ? "never-waited" : "wgmma-warps", "wgmma"};
        f.pc = p.pc;
        if (all) f.value[0] = its.groups.empty() || its.groups.back() <= of_group[g].executed;  // not even committed
        else f.value[0] = p.issued, f.value[1] = g * WARPS_OF_GROUP;
        file(warp->lanes, f);
        return;
    }
}

extern "C" void simt_wgmma_wait(int groups_left) {
    ENTER_FROM_KERNEL(me);
    join_collective(me, SIMT_WGMMA_WAIT, ~0u, nullptr, nullptr, groups_left);
    while (me->block->worker->warpgroups->waits(me->warp)) wait_for_others(me, IN_WGMMA);
}

// ---- what must not be touched meanwhile ---------------------------------------------------------
bool Warpgroups::file_if_in_use(Lane* lane, uintptr_t address, int bytes, bool write, uintptr_t pc) {
    for (const RegistersInUse& r : lane->in_use) {
        if (address >= r.high || address + (uintptr_t)bytes <= r.low || (r.of_a && !write)) continue;
        const OfWarp& mine = of_warp[lane->warp->index];
        // 1: it is committed
        file(lane, {"wgmma-registers",
                    write ? "store" : "load",
                    r.of_a ? "A" : "accumulators",
                    {!mine.groups.empty() && mine.groups.back() >= r.number},
                    pc,
                    r.pc,
                    lane->id});
        return true;
    }
    return false;
}

// Does the lane know that this wgmma has been computed? Any warp of its group that has waited for it may have told.
bool Warpgroups::known(const Lane* lane, int group, uint64_t number) const {
    for (int w = group * WARPS_OF_GROUP; w < (group + 1) * WARPS_OF_GROUP; w++) {
        const OfWarp& its = of_warp[w];
        if (w == lane->warp->index) {
            if (its.completed >= number) return true;
            continue;
        }
        const uint32_t time = lane->warp->known[w];
        auto after = std::upper_bound(its.passed.begin(), its.passed.end(), time,
                                      [](uint32_t t, const Passed& p) { return t < p.time; });
        if (after != its.passed.begin() && (after - 1)->upto >= number) return true;
    }
    return false;
}

bool Warpgroups::file_if_read(Lane* lane, uint64_t address, int bytes, const char* how) {
    for (uint64_t piece = address / 16; piece <= (address + bytes - 1) / 16; piece++)
        for (int g = 0; g * WARPS_OF_GROUP < lane->block->warps; g++) {
            const uint64_t number = readers[piece * MAX_GROUPS + g];
            if (!number || known(lane, g, number)) continue;
            // the last number is 1 where it is computed, but nothing tells this lane
            file(lane, {worker->shadow->overwrites((uint32_t)piece * 16, how),
                        how,
                        "wgmma",
                        {(int64_t)piece * 16, 16, number <= of_group[g].executed},
                        0,
                        of_group[g].pcs[number - 1],
                        g * GROUP_LANES});
            told.insert((uint32_t)piece * 16);
            return true;
        }
    return false;
}

}  // namespace simt
