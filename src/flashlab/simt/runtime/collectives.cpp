// Collectives: shuffles, votes and matrix operations, in which the lanes of a warp meet.
//
// A lane that comes to one leaves its operands, takes a place in a slot (one slot for each mask that is being
// waited for) and lets the others run. The last lane to arrive does the work for all of them, reading each
// lane's operands from, and writing each result to, that lane's own stack.
#include "clocks.h"
#include "counters.h"
#include "values.h"
#include "warpgroup.h"

namespace simt {

const char* collective_name(int op, int param) {
    static const char* const votes[] = {"__ballot_sync", "__any_sync", "__all_sync", "__uni_sync"};  // as SimtVote
    static const char* const names[] = {
        "__syncwarp", "a shuffle", "a vote", "a __match_sync", "a __reduce_sync", "elect.sync", "ldmatrix",
        "stmatrix",   "mma",       "wgmma",  "wgmma_fence",    "wgmma_commit",    "wgmma_wait", "setmaxnreg"};
    static_assert(sizeof names / sizeof *names == SIMT_SETMAXNREG + 1, "each SimtOp has a name");
    return op == SIMT_VOTE ? votes[param] : names[op];
}
// The PTX of these says .aligned: all 32 lanes must execute the very same instruction.
static bool aligned(int op) { return op >= SIMT_LDMATRIX; }

static void shuffle(Warp* warp, const Slot& slot) {
    for (int l = 0; l < WARP; l++) {
        if (!(slot.arrived >> l & 1)) continue;
        const auto& in = *(const SimtShuffleIn*)warp->lanes[l].in;
        const int width = in.width, segment = l & ~(width - 1), end = segment + width;
        int from = in.kind == SIMT_SHFL_IDX   ? segment + (in.arg & (width - 1))
                   : in.kind == SIMT_SHFL_XOR ? l ^ in.arg
                   : in.kind == SIMT_SHFL_UP  ? l - in.arg
                                              : l + in.arg;
        // Beyond its segment a lane keeps its own value; xor alone may look back, to a segment before its own.
        if (from >= end || (in.kind == SIMT_SHFL_UP && from < segment) || from < 0 || from >= WARP) from = l;
        if (!(slot.arrived >> from & 1)) {
            file(&warp->lanes[l], {"shuffle-lane", "shuffle", "", {from, slot.mask}});
            from = l;
        }
        const uint64_t value = ((const SimtShuffleIn*)warp->lanes[from].in)->value;
        if (slot.param >= 2 && never_set(&value, slot.param)) file_never_set(&warp->lanes[from], "shuffle", slot.pc);
        *(uint64_t*)warp->lanes[l].out = value;
    }
}

static void vote(Warp* warp, const Slot& slot) {
    unsigned ballot = 0;
    for (int l = 0; l < WARP; l++)
        if ((slot.arrived >> l & 1) && *(const int*)warp->lanes[l].in) ballot |= 1u << l;
    const unsigned all = ballot == slot.arrived, any = ballot != 0;
    const unsigned result = slot.param == SIMT_BALLOT ? ballot
                            : slot.param == SIMT_ANY  ? any
                            : slot.param == SIMT_ALL  ? all
                                                      : all || !any;
    for (int l = 0; l < WARP; l++)
        if (slot.arrived >> l & 1) *(unsigned*)warp->lanes[l].out = result;
}

static void match(Warp* warp, const Slot& slot) {
    for (int l = 0; l < WARP; l++) {
        if (!(slot.arrived >> l & 1)) continue;
        unsigned same = 0;
        for (int k = 0; k < WARP; k++)
            if ((slot.arrived >> k & 1) && *(const uint64_t*)warp->lanes[k].in == *(const uint64_t*)warp->lanes[l].in)
                same |= 1u << k;
        unsigned* out = (unsigned*)warp->lanes[l].out;
        out[1] = same == slot.arrived;
        out[0] = slot.param && !out[1] ? 0 : same;
    }
}

static void reduce(Warp* warp, const Slot& slot) {
    const int kind = slot.param & 15;
    const bool is_signed = slot.param >> 4;
    bool first = true;
    unsigned total = 0;
    for (int l = 0; l < WARP; l++) {
        if (!(slot.arrived >> l & 1)) continue;
        const unsigned v = *(const unsigned*)warp->lanes[l].in;
        const bool less = is_signed ? (int)v < (int)total : v < total;
        if (first) total = v;
        else if (kind == SIMT_ADD) total += v;
        else if (kind == SIMT_MIN) total = less ? v : total;
        else if (kind == SIMT_MAX) total = less ? total : v;
        else if (kind == SIMT_AND) total &= v;
        else if (kind == SIMT_OR) total |= v;
        else total ^= v;
        first = false;
    }
    for (int l = 0; l < WARP; l++)
        if (slot.arrived >> l & 1) *(unsigned*)warp->lanes[l].out = total;
}

// elect.sync: the PTX ISA does not say which lane it is, but that it is always the same one.
static void elect(Warp* warp, const Slot& slot) {
    for (int l = 0; l < WARP; l++)
        if (slot.arrived >> l & 1) *(unsigned*)warp->lanes[l].out = l == __builtin_ctz(slot.mask);
}

static void execute(Warp* warp, const Slot& slot) {
    Sites& sites = *warp->block->worker->sites;
    const Kind kind = slot.op == SIMT_SYNCWARP ? SYNC_WARP : slot.op == SIMT_SHUFFLE ? SHUFFLE : VOTE;
    if (!aligned(slot.op)) sites[sites.find(slot.pc, kind)].count[0]++;  // the others count for themselves
    switch (slot.op) {
    case SIMT_SYNCWARP:  // what the lanes did is visible to all of them
        for (int l = 0; l < WARP; l++)
            if (slot.arrived >> l & 1) fences_count(&warp->lanes[l]);
        warp->known[warp->index] = warp->time++;
        break;
    case SIMT_SHUFFLE: shuffle(warp, slot); break;
    case SIMT_VOTE: vote(warp, slot); break;
    case SIMT_MATCH: match(warp, slot); break;
    case SIMT_REDUCE: reduce(warp, slot); break;
    case SIMT_ELECT: elect(warp, slot); break;
    case SIMT_LDMATRIX: load_matrix(warp, slot); break;
    case SIMT_STMATRIX: store_matrix(warp, slot); break;
    case SIMT_MMA: multiply(warp, slot); break;
    case SIMT_WGMMA: warp->block->worker->warpgroups->issue(warp, slot); break;
    case SIMT_WGMMA_FENCE: warp->block->worker->warpgroups->fence(warp); break;
    case SIMT_WGMMA_COMMIT: warp->block->worker->warpgroups->commit(warp, slot); break;
    case SIMT_WGMMA_WAIT: warp->block->worker->warpgroups->wait(warp, slot); break;
    case SIMT_SETMAXNREG: set_registers(warp, slot); break;
    }
    if (slot.arrived == warp->alive && !warp->dirty.empty()) count_incomplete(warp);  // all lanes are here
}

// Does the work if no lane of the mask is missing any more (lanes that have exited are not waited for).
static bool complete(Warp* warp, Slot& slot) {
    if (!slot.arrived || (slot.mask & warp->alive & ~slot.arrived)) return false;
    if (aligned(slot.op) && slot.arrived != ~0u) {
        Lane* lane = &warp->lanes[__builtin_ctz(slot.arrived)];
        file_fatal(lane,
                   {"lanes-missing", collective_name(slot.op, slot.param), "", {slot.arrived, warp->count}, slot.pc});
    }
    if (slot.op != SIMT_SYNCWARP &&
        (slot.mask & (warp->count == WARP ? ~0u : (1u << warp->count) - 1) & ~slot.arrived)) {
        file(&warp->lanes[__builtin_ctz(slot.arrived)],
             {"exited-lanes", collective_name(slot.op, slot.param), "", {slot.mask & ~slot.arrived}, slot.pc});
    }
    Slot done = slot;
    slot.arrived = 0;
    warp->slots_used &= ~(1u << (&slot - warp->slots));
    execute(warp, done);
    for (int l = 0; l < warp->count; l++)
        if ((done.arrived >> l & 1) && warp->lanes[l].state == IN_COLLECTIVE) make_runnable(&warp->lanes[l]);
    return true;
}

void lane_gone(Warp* warp) {
    for (Slot& slot : warp->slots) complete(warp, slot);
}

extern "C" void simt_warp(int op, unsigned mask, const void* in, void* out, int param) {
    ENTER_FROM_KERNEL(me);
    join_collective(me, op, mask, in, out, param);
}
void join_collective(Lane* me, int op, unsigned mask, const void* in, void* out, int param) {
    Warp* warp = me->warp;
    const unsigned bit = 1u << me->lane;
    if (!(mask & bit)) file_fatal(me, {"mask-without-self", collective_name(op, param), "", {mask, me->lane}});
    Slot* slot = nullptr;
    for (uint32_t left = warp->slots_used; left; left &= left - 1) {
        Slot& s = warp->slots[__builtin_ctz(left)];
        if (!(s.mask & mask)) continue;
        const Finding diverged = {"divergent",
                                  collective_name(op, param),
                                  collective_name(s.op, s.param),
                                  {mask, s.mask},
                                  0,
                                  s.pc,
                                  warp->lanes[__builtin_ctz(s.arrived)].id};
        if (s.mask != mask || s.op != op || s.param != param) file_fatal(me, diverged);
        if (s.pc != me->pc) file(me, diverged);  // another line: Python drops it where the line is the same
        slot = &s;
        break;
    }
    if (!slot) {
        slot = &warp->slots[__builtin_ctz(~warp->slots_used)];
        *slot = {mask, 0, op, param, me->pc};
        warp->slots_used |= 1u << (slot - warp->slots);
    }
    slot->arrived |= bit;
    me->in = in, me->out = out;
    if (!complete(warp, *slot)) wait_for_others(me, IN_COLLECTIVE);
}

// Which lanes are active here: those that come to this place before the warp can go on without them.
extern "C" unsigned simt_activemask(int line) {
    ENTER_FROM_KERNEL(me);
    unsigned result = 0;
    me->in = (const void*)(intptr_t)line;
    me->out = &result;
    wait_for_others(me, IN_ACTIVEMASK);
    return result;
}

}  // namespace simt
