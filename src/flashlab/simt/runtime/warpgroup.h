// Warpgroups: four warps, the first with a number that is a multiple of 4, and their wgmma.
//
// A wgmma exists once all four warps have issued it. It is computed when one of them waits for it and no thread of the
// block can go on: what reads its sums, or has its operands refilled, too early is then wrong every time. Each warp
// issues the same sequence, so a number says which is meant: the first of a warpgroup is number 1. They are computed in
// this order.
#pragma once
#include "../include/simt/wgmma_ops.h"
#include "machine.h"
#include <set>

namespace simt {

constexpr int WARPS_OF_GROUP = 4, GROUP_LANES = WARPS_OF_GROUP * WARP, MAX_GROUPS = MAX_WARPS / WARPS_OF_GROUP;

struct Product {  // one wgmma
    uintptr_t pc;
    int site, variant, n;  // variant: SimtWgmma
    int issued;  // by which of the four warps: a bit each
    uint64_t a, b;  // descriptors
    int add;
    float* d[GROUP_LANES];
    uint32_t a_registers[GROUP_LANES][4];
    std::vector<uint32_t> a_pieces, b_pieces;  // shared addresses of 16 bytes each; NOWHERE: out of bounds
};
constexpr uint32_t NOWHERE = ~0u;

class Warpgroups {  // of the block that runs on a worker
public:
    explicit Warpgroups(Worker* worker) : worker(worker) {}
    void begin_block();
    void issue(Warp* warp, const Slot& slot);
    void fence(Warp* warp);
    void commit(Warp* warp, const Slot& slot);
    void wait(Warp* warp, const Slot& slot);
    bool pass_waits();  // for the scheduler, when nobody else can go on; true: somebody can now
    bool waits(const Warp* warp) const { return used && of_warp[warp->index].waiting_for; }
    bool file_deadlock();  // where a warp waits for a wgmma that another has not issued
    void file_never_waited();  // at the end of a block
    // A watched build is about to write these bytes. True, and filed, where a wgmma may still be reading them.
    bool file_if_read(Lane* lane, uint64_t address, int bytes, const char* how);
    // The lane touches its own registers while a wgmma that it has issued uses them.
    bool file_if_in_use(Lane* lane, uintptr_t address, int bytes, bool write, uintptr_t pc);

private:
    struct Passed {  // a wait that was passed
        uint32_t time;  // of the warp
        uint64_t upto;  // the last wgmma that had then been computed
    };
    struct OfWarp {
        uint64_t issued = 0, completed = 0, waiting_for = 0;  // 0: it does not wait
        std::vector<uint64_t> groups;  // the last wgmma of each committed group
        std::vector<Passed> passed;
        bool fenced = false, ever_fenced = false;  // since its last wait that waited for something; at all
        uintptr_t wait_pc = 0;
        int pending = 0;
    };
    struct OfGroup {
        uint64_t executed = 0;
        std::vector<uintptr_t> pcs;  // of all, by number - 1
        std::deque<Product> queue;  // the first is number executed + 1
    };
    Product& product(OfGroup& group, uint64_t number) { return group.queue[number - group.executed - 1]; }
    void prepare(Product& p, Warp* warp, const SimtWgmmaIn& in);
    void compare(Product& p, Warp* warp, const SimtWgmmaIn& in, const Slot& slot);
    void check_operands(const Product& p, Warp* warp);
    void check_fence(Warp* warp, int lane, const SimtWgmmaIn& in, const Product& p, uint64_t number);
    void pass(Warp* warp);
    void execute(int group, Product& p, uint64_t number);
    void multiply(const Product& p, Block* block, int group);
    bool known(const Lane* lane, int group, uint64_t number) const;

    Worker* worker;
    bool used = false;  // in this block
    int waiting = 0;  // warps, in a wgmma_wait
    OfWarp of_warp[MAX_WARPS];
    OfGroup of_group[MAX_GROUPS];
    // By piece of shared memory and warpgroup: the last of its wgmma that reads it; 0: none.
    std::vector<uint32_t> readers;
    std::set<uint32_t> told;  // pieces that were overwritten under way: what follows from that is not told again
    alignas(64) float a[64][16], b[16][256], sums[4][256];  // of the wgmma that is computed
};

// ---- registers.cpp: setmaxnreg ------------------------------------------------------------------
void begin_registers(Block* block);
void set_registers(Warp* warp, const Slot& slot);
bool file_registers_deadlock(Block* block);
void file_registers(Block* block);  // at the end of a block

}  // namespace simt
