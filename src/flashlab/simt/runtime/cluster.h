// Thread block clusters: blocks that are live at the same time, a barrier of all of them, and accesses to each other's
// shared memory.
//
// Each block of a cluster has an OS thread of its own, as its shared memory is that thread's. But only one of them runs
// at a time: a turn goes round, in the order of the ranks, and is passed on when nobody in the block can go on, when
// somebody waits in vain, or when the block ends. So what happens depends on no luck, and who has the turn may touch
// what belongs to the other blocks.
//
// The n-th arrival of a thread and its n-th wait are of phase n - 1. A thread's access to another block's memory, made
// after n arrivals, comes before what a thread of another block does after n + 1 waits, its own or, with a barrier of
// the block between, another's (CLUSTER_CLOCK); and before nothing else there.
#pragma once
#include "clocks.h"
#include "shadow.h"

namespace simt {

constexpr unsigned MAX_CLUSTER = 16, PORTABLE_CLUSTER = 8;

struct Cluster {
    struct Member {
        Block* block = nullptr;  // while it is live
        bool ended = false;
        int pending = 0;     // threads that have not arrived in the phase under way
        Clock released[3] = {};  // by the arrivals in it (phase % 3) and in the two before
        std::vector<uint32_t> relaxed;  // by phase: the warps whose arrivals released nothing
        RemoteAccess last;   // to its memory: of all, the one after most arrivals
    };
    const int size;
    std::vector<Member> member;  // by rank
    uint32_t phase = 0;          // that is under way
    int idle = 0;                // blocks that have had the turn since a lane has run
    int turn = 0, left = 0;      // whose turn it is; how many have left. The mutex guards these two and `ended`.
    std::mutex mutex;
    std::condition_variable changed;
    Cluster(int size, int threads);
    int live() const;  // blocks that have not ended, though they may not have begun
    void end_phase_if_all_have_arrived();
};

void enter_cluster(Block* block);  // waits for its first turn
void leave_cluster(Block* block);
bool pass_turn(Block* block);  // and waits until it comes back; false: the launch is over
bool pass_cluster_waits(Block* block);      // lets those go on whose phase has ended; false: nobody can
bool wait_for_cluster(Block* block);        // nobody in the block can go on; false: nobody in the cluster can
void leave_cluster_barrier(Lane* me);       // the thread has exited
void file_cluster_end(Block* block);        // the block has ended: might others still have used its memory?
Block* missing_in_cluster(Block* block);  // where a deadlock is: a block that the cluster barrier waits for
std::string waits_in_cluster(const Block& block);     // deadlock.cpp

}  // namespace simt
