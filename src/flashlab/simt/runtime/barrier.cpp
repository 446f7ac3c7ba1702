// Barriers of a block: __syncthreads and its variants, and the numbered ones of PTX (bar.sync, bar.arrive).
//
// A barrier lets go when the last of its threads arrives, and makes visible to each what the others did
// before: the warps' vector clocks are joined (shadow.h). __syncthreads waits for every thread that has not
// exited, as the hardware does.
#include "clocks.h"
#include "counters.h"
#include "events.h"
#include "findings.h"

namespace simt {

static void arrive(Lane* me, Barrier& b, int predicate = 0) {
    if (!b.arrived) {
        b.pc = me->pc, b.first = me->id, b.count = 0;
        b.clock = Clock();
    }
    b.arrived++;
    b.count += predicate != 0;
    release(me, b.clock);
}

static void let_go(Block* block, Barrier& b) {
    Sites& sites = *block->worker->sites;
    sites[sites.find(b.pc, BARRIER)].count[0]++;
    if (&b == block->barriers && b.arrived < block->threads) {
        Lane* gone = std::find_if(block->lane, block->lane + block->threads, [](Lane& l) { return l.state == DONE; });
        Finding f{"exited-threads", "__syncthreads"};
        f.pc = b.pc, f.thread = b.first, f.other_thread = gone->id;
        f.value[0] = b.arrived, f.value[1] = block->threads;
        file(gone, f);
    }
    b.result = b.kind == SIMT_BAR_AND ? b.count == b.arrived : b.kind == SIMT_BAR_OR ? b.count > 0 : b.count;
    b.arrived = 0;
    uint64_t seen = 0;  // warps that have learnt
    for (Lane* lane : b.waiting) {
        Warp* w = lane->warp;
        if (!(seen >> w->index & 1)) {
            seen |= 1ull << w->index;
            acquire(w, b.clock);
            w->time++;
            count_incomplete(w);
        }
        make_runnable(lane);
    }
    b.waiting.clear();
}

// A thread has exited: __syncthreads may have been waiting for it alone.
void thread_gone(Block* block) {
    Barrier& b = block->barriers[0];
    if (b.arrived && b.arrived >= block->alive) let_go(block, b);
}

// It arrives, and goes on when so many have.
static void arrive_and_wait(Lane* me, int id, int threads, int needed, int predicate = 0) {
    Barrier& b = me->block->barriers[id];
    const bool noted = me->lane == 0;
    if (noted) note(me->warp, DID_BARRIER_BEGIN, me->pc, id, threads);
    me->warp->loading.clear();
    arrive(me, b, predicate);
    b.waiting.push_back(me);
    if (b.arrived >= needed) {
        me->state = IN_BARRIER;  // for let_go, which makes it runnable again
        me->warp->runnable &= ~(1u << me->lane);
        let_go(me->block, b);
    } else {
        wait_for_others(me, IN_BARRIER);
    }
    if (noted) note(me->warp, DID_BARRIER_END, me->pc, id, threads);
}

extern "C" int simt_barrier(int kind, int predicate) {
    ENTER_FROM_KERNEL(me);
    Barrier& b = me->block->barriers[0];
    if (b.arrived && (b.kind != kind || b.pc != me->pc)) {
        Finding f{"divergent", "__syncthreads"};  // Python drops it where both are the same line
        f.other_pc = b.pc, f.other_thread = b.first;
        f.text = "__syncthreads";
        if (b.kind != kind) file_fatal(me, f);
        file(me, f);
    }
    b.kind = kind;
    arrive_and_wait(me, 0, me->block->threads, me->block->alive, predicate);
    return b.result;
}

extern "C" void simt_named_barrier(int id, int threads, int wait) {
    ENTER_FROM_KERNEL(me);
    if (id < 0 || id >= BARRIERS || threads <= 0 || threads % WARP)
        file_fatal(me, {"barrier-arguments", "bar.sync", "", {id, threads}});
    Barrier& b = me->block->barriers[id];
    if (b.arrived && b.expected != threads)
        file_fatal(me, {"barrier-threads", "bar.sync", "", {id, threads, b.expected}, 0, b.pc, b.first});
    b.expected = threads, b.kind = SIMT_BAR_COUNT;
    if (wait) return arrive_and_wait(me, id, threads, threads);
    if (me->lane == 0) note(me->warp, DID_BARRIER_ARRIVE, me->pc, id, threads);
    arrive(me, b);
    if (b.arrived >= threads) let_go(me->block, b);
    go_on_after_release(me);
}

}  // namespace simt
