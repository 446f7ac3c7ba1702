// mbarriers: 8 bytes of shared memory that count arrivals and the bytes of copies, phase by phase.
//
// What the bytes hold is nobody's business (the PTX ISA calls them opaque): the state is in a table beside shared
// memory. As everywhere, the emulator takes the last moment that is allowed. Copies land, and a wait passes, when no
// other thread of the block can go on: what came too early then comes too early every time.
#pragma once
#include "bulk.h"
#include <map>

namespace simt {

constexpr uint8_t TIMES_IN_VAIN = 16;
constexpr int64_t MAX_TX = (1 << 20) - 1;  // what the tx-count of a phase can hold; and the arrival count

void land(Block* block, const BulkCopy& load, int clock, uint32_t time);  // bulk_load.cpp

struct Mbarrier {
    uint32_t address;
    int count;             // arrivals that end a phase
    int pending;           // of the phase under way, those still missing
    uint32_t phase;        // its number
    int64_t expected = 0;  // bytes announced for it
    int64_t brought = 0;   // bytes of the loads issued for it
    std::vector<BulkCopy> loads;
    std::vector<Lane*> waiting;  // for its end
    uint32_t warps = 0;          // that have arrived in it
    uint8_t looked[MAX_THREADS] = {};  // how often each lane has asked whether it has ended
    uint8_t first[MAX_WARPS];    // the lane of each that came first
    Clock arrived;               // what its arrivals have released
    Clock passed;                // the same of all phases before
    int clock;                   // counts the phases that have ended, of all mbarriers of this address
    Stamp init;
    uint16_t init_fences;
    uint32_t init_fenced;  // time of the fence_mbarrier_init; 0: none yet
    uintptr_t init_pc;
    bool told = false;  // that somebody came too early
    struct {            // the arrival that ended the phase before; lane is null where it was none
        const Lane* lane = nullptr;
        uintptr_t pc;
        uint32_t calls;
        bool in_step(const Lane* me) const {
            return lane && lane != me && lane->warp == me->warp && pc == me->pc && calls == me->calls;
        }
    } last;

    bool has_all() const { return !pending && brought == expected; }
    // The first times that a lane asks about the phase under way, nobody says that it has ended: the copies may land, and
    // a try_wait may give up, at any time. So an answer that is not looked at, or asked for a few times only, is found as
    // what it causes.
    bool gives_up(const Lane* me, uint32_t parity) {
        return (phase & 1) == parity && looked[me->id] < TIMES_IN_VAIN && ++looked[me->id];
    }
};

class Mbarriers {  // of a block
public:
    void begin_block();
    // null: there is none
    Mbarrier* find(uint32_t address);
    void make(Lane* me, uint32_t address, int count);
    void end(uint32_t address);
    void end_phase(Block* block, Mbarrier& bar);
    // Lets those go on that wait for a phase that has ended, or that ends when its copies land. False: nobody can.
    bool pass_waits(Block* block);
    void file_unwaited(Block* block);  // the block has ended: loads that nobody has waited for
    std::vector<Lane*> passing;  // they wait for a phase that has ended
    std::map<uint32_t, Mbarrier> all;

private:
    std::map<uint32_t, std::pair<int, uint32_t>> clocks;  // by address: which one, and its time
};

// The mbarrier that `me` means; what is wrong with it is filed, and ends the launch.
Mbarrier& mbarrier_at(Lane* me, uint32_t address, const char* how);
// A load has been issued that counts at this mbarrier.
void add_load(Lane* me, Mbarrier& bar, uint32_t address, const BulkCopy& load);

}  // namespace simt
