// setmaxnreg: how many registers the threads of a warp have. They are dealt out again within what the launch gave the
// block: 65536, shared by its threads in steps of 8. What dec gives back, inc of other warps takes.
#include "events.h"
#include "findings.h"
#include "warpgroup.h"
#include <algorithm>

namespace simt {

constexpr int REGISTERS = 65536, STEP = 8, MOST = 256;

void begin_registers(Block* block) {
    Registers& r = block->registers;
    r = Registers();
    r.at_launch = std::min(MOST, REGISTERS / (block->warps * WARP) / STEP * STEP);
    for (int& n : r.of_warp) n = r.at_launch;
}

// The waiting warps, in order, take what they can.
static void deal(Block* block) {
    Registers& r = block->registers;
    for (int w = 0; w < block->warps; w++) {
        const int needed = r.wanted[w] ? (r.wanted[w] - r.of_warp[w]) * WARP : 0;
        if (!needed || needed > r.free) continue;
        r.free -= needed;
        r.of_warp[w] = r.wanted[w];
        r.wanted[w] = 0;
        for (int l = 0; l < block->warp[w].count; l++)
            if (block->warp[w].lanes[l].state == IN_REGISTERS) make_runnable(&block->warp[w].lanes[l]);
    }
}

void set_registers(Warp* warp, const Slot& slot) {
    Block* block = warp->block;
    Registers& r = block->registers;
    const int wanted = slot.param & 511, now = r.of_warp[warp->index];
    const bool more = slot.param & 512;
    note(warp, DID_REGISTERS, slot.pc, wanted);
    r.pc[warp->index] = slot.pc;
    r.times[warp->index]++;
    if (more ? wanted < now : wanted > now) {
        file(warp->lanes, {"registers-direction",
                           more ? "setmaxnreg_inc" : "setmaxnreg_dec",
                           "",
                           {wanted, now, r.at_launch},
                           slot.pc});
        return;
    }
    if (more && wanted > now) r.wanted[warp->index] = wanted;
    if (!more) r.free += (now - wanted) * WARP, r.of_warp[warp->index] = wanted;
    deal(block);
}

extern "C" void simt_setmaxnreg(int registers, int increase) {
    ENTER_FROM_KERNEL(me);
    join_collective(me, SIMT_SETMAXNREG, ~0u, nullptr, nullptr, registers | (increase ? 512 : 0));
    while (me->block->registers.wanted[me->warp->index]) wait_for_others(me, IN_REGISTERS);
}

bool file_registers_deadlock(Block* block) {
    const Registers& r = block->registers;
    for (int w = 0; w < block->warps; w++) {
        if (!r.wanted[w]) continue;
        Finding f{"registers-missing", "setmaxnreg_inc"};
        f.pc = r.pc[w];
        f.value[0] = r.wanted[w], f.value[1] = r.at_launch * block->warps * WARP;
        for (int other = 0; other < block->warps; other++)
            if (other != w) f.value[2] += r.of_warp[other] * WARP;
        f.text = std::to_string(r.at_launch);
        file(block->warp[w].lanes, f);
        file_registers(block);
        return true;
    }
    return false;
}

void file_registers(Block* block) {
    const Registers& r = block->registers;
    for (int first = 0; first < block->warps; first += WARPS_OF_GROUP) {
        const int end = std::min(first + WARPS_OF_GROUP, block->warps);
        int most = first, mask = 0;
        for (int w = first; w < end; w++)
            if (r.times[w] > r.times[most]) most = w;
        for (int w = first; w < end; w++)
            if (r.times[w] == r.times[most]) mask |= 1 << (w - first);
        if (mask == (1 << (end - first)) - 1) continue;
        file(block->warp[most].lanes, {"registers-warps", "setmaxnreg", "", {mask, first, end - first}, r.pc[most]});
    }
}

}  // namespace simt
