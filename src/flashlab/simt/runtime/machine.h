// The machine: lanes, warps and blocks, and who may run. Everything else hangs on these three structures.
//
//   grid   of blocks    they are dealt out to a few workers (OS threads), in order, one at a time each (cluster.h: of
//                       clusters of blocks)
//   block  of warps     its shared memory is the worker's copy of the module's thread_local data
//   warp   of 32 lanes  each lane is a fiber; they meet only in collectives and barriers
//
// Lanes need not run in step. A GPU since Volta promises no more: between two meetings any order will do.
#pragma once
#include "../include/simt/host_api.h"
#include "../include/simt/ptx_ops.h"
#include "fiber.h"
#include <pthread.h>
#include <setjmp.h>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace simt {

constexpr int WARP = 32, MAX_THREADS = 1024, MAX_WARPS = MAX_THREADS / WARP, BARRIERS = 16;
constexpr int CLOCKS = 128;  // of a block: one a warp, then one for the copies that each mbarrier counts (clocks.h)
constexpr int CLUSTER_CLOCK = CLOCKS - 1;  // and the last counts the waits at the cluster barrier
constexpr size_t PAGE = 4096;
// A lane's local memory: the 512 KB that a GPU gives a thread, and a quarter more, as a CPU's frames are larger.
constexpr size_t STACK = 640 << 10;
// Between two stacks lie 17 pages. Most are a guard, and a stride that is no power of two keeps the tops of a
// block's stacks from falling into the same set of the cache. Large frames are probed page by page
// (-fstack-clash-protection), so that none steps over the guard.
constexpr size_t STACK_GUARD = 16 * PAGE;
constexpr size_t STACK_STRIDE = STACK + 17 * PAGE;
constexpr size_t MAX_SHARED = 227 << 10;  // what the largest GPUs give a block (sm_90, sm_100)

struct Lane;
struct Warp;
struct Block;
struct Worker;

enum State : uint8_t {
    RUNNABLE, IN_COLLECTIVE, IN_BARRIER, IN_ACTIVEMASK, IN_MBARRIER, IN_WGMMA, IN_REGISTERS, IN_CLUSTER, DONE
};

// One cp.async: bytes on their way from global to shared memory (async_copy.cpp).
struct Copy {
    uint32_t dst;
    const char* src;
    int bytes, src_bytes, site;
    uint32_t group;
};

struct BulkStore;   // bytes on their way from shared to global memory (bulk_store.cpp)
struct PhaseWait {  // what a lane waits for: a phase of an mbarrier (mbarrier.cpp)
    uint32_t bar, parity;
    bool over = false;  // it has ended: what later phases release is not for this wait
};

// Two accesses that nothing orders: what is known of the earlier one, and how to tell of it.
struct Conflict {
    const char *kind, *how, *other_how;
    uintptr_t other_pc;
    int other_thread;
    int64_t other_block;  // -1: the same
    int64_t value[3];
    bool same_warp, same_instruction;  // one execution of one instruction
};
// A store whose hook has run (values.h).
struct PendingStore {
    uintptr_t address, pc;
    int bytes = 0;  // 0: none; -1: no store, but a load or an atomic that may learn from other blocks (ordering.h)
    bool has_conflict;
    bool watched;       // others have stored there in this launch: does the value change?
    bool load_came;  // since: see values.h
    uint8_t before[16];
    Conflict conflict;
};

// Registers that a wgmma under way uses, and those that a wgmma has ever been given (warpgroup.cpp).
struct RegistersInUse {
    uintptr_t low, high, pc;
    uint64_t number;  // of the last wgmma that uses them; pc is where the first was issued
    bool of_a;        // it only reads them
};
struct GivenRegisters {
    uintptr_t address;
    uint32_t bytes;
    uint64_t number, content;  // content: what they held when that was last settled, as a hash
};

enum Space : uint8_t { SHARED, GLOBAL };

struct LaneOfBlock {  // what of a lane begins anew with each block
    State state = RUNNABLE;
    uintptr_t pc = 0;  // return address of the runtime call it is in, or was last in
    int accesses = 0;  // since it last let others run
    uintptr_t polled = 0;  // the word that it looked at last, and what it saw (scheduler.cpp)
    uint64_t saw = 0;
    int in_vain = 0;  // how often it has seen the same
    uint32_t calls = 0;  // of the runtime: lanes that go in step have made as many
    PendingStore store;
    uintptr_t in_use_low = 0, in_use_bytes = 0;  // all of in_use lies in there
    std::vector<RegistersInUse> in_use;
    std::vector<GivenRegisters> given;
    struct Fence {
        uint32_t time = 0;  // of the warp; 0: there was none
        std::vector<uint32_t> known;
    } fence, earlier_fence;  // its last __threadfence, and the one before (ordering.h)
    const void* in;  // while in a collective: its operands and its result, on its own stack
    void* out;
    uint32_t group = 0;     // cp.async: number of the open group
    size_t first_copy = 0;  // copies[first_copy...] are still on their way
    std::vector<Copy> copies;
    std::vector<uint32_t> proxy_fences[2];  // by Space: from which time of the warp on each of its fences counts (proxy.h)
    std::vector<uint32_t> fenced[2];        // all that warp w did up to this time its own fences cover
    struct VolatileLoad {
        uint32_t call, time, known;  // which call it was; the warp's time, what its block knew of that word then
    };
    std::unordered_map<uintptr_t, VolatileLoad> volatile_loads;  // of global memory, that no store of its own followed
    uint32_t volatile_known = 0;                                 // of the one that the store under way follows
    PhaseWait phase_wait;
    uint32_t cluster_arrivals = 0, cluster_waits = 0;  // at the cluster barrier: made, and ended (cluster.h)
    uint32_t bulk_group = 0;  // number of the open group of its stores
    std::vector<std::shared_ptr<BulkStore>> stores;
};
struct Lane : LaneOfBlock {  // one CUDA thread
    Fiber fiber;
    Block* block;
    Warp* warp;
    uint8_t* stack;  // lowest address
    uint3 thread_idx;
    int id, lane;  // in the block, in the warp
};

struct Slot {  // a collective for which some lanes wait
    unsigned mask, arrived;
    int op, param;
    uintptr_t pc;  // of the first lane that arrived
};

// One load or store of a warp: the k-th execution of an instruction by each of its lanes (counters.cpp).
struct Request {
    uint32_t mask = 0;
    int bytes = 0;  // a lane
    uint64_t address[WARP];
};
struct SiteLog {
    uint32_t executions[WARP] = {};   // how often each lane executed the instruction
    std::vector<Request> requests;    // requests[i] is execution number first + i
    uint32_t first = 0, counted = 0;  // the first `counted` of them are complete, and in the counters
    bool dirty = false;
};

struct Clock {  // what is visible, to a warp or to some joined (clocks.h)
    uint32_t known[CLOCKS];         // known[w]: all that warp w did up to this time
    uint32_t fenced[2][MAX_WARPS];  // and of that, to the async proxy as well (proxy.h), by Space
};

struct Loading {  // a row of an ldmatrix whose registers nobody has used yet
    uint32_t address;
    int thread, site;
};
struct Warp : Clock {
    Block* block;
    Lane* lanes;
    int index, count;           // count < 32 where the block's size is no multiple of 32
    uint32_t runnable, alive;   // a bit a lane
    uint32_t time;              // ticks at each __syncwarp and barrier (shadow.h)
    Slot slots[WARP];           // disjoint masks: at most 32
    uint32_t slots_used;        // a bit a slot
    std::vector<SiteLog> logs;  // by site
    std::vector<int> dirty;     // sites whose log is not empty
    std::vector<Loading> loading;  // of blocks with mbarriers
};

struct Barrier {
    int arrived = 0, expected = 0;
    Clock clock;  // of the arrived warps
    std::vector<Lane*> waiting;
    int count = 0, result = 0;  // true predicates of __syncthreads_count, _and, _or: so far, and in the end
    int kind = 0;
    uintptr_t pc = 0;  // where the first lane arrived
    int first = 0;     // which lane that was
};

struct Registers {  // registers.cpp
    int at_launch = 0, free = 0;  // per thread; in all
    int of_warp[MAX_WARPS] = {}, wanted[MAX_WARPS] = {};  // per thread; 0: it does not wait for more
    int times[MAX_WARPS] = {};                            // that it has executed setmaxnreg
    uintptr_t pc[MAX_WARPS] = {};
};

struct Launch {  // what is the same for every block
    dim3 grid, block;
    size_t shared_bytes;
    void (*call)(const void*);
    const void* closure;
    size_t closure_bytes;
    bool checked;
    const void* kernel;  // its address; null where there is no one function
    int number;  // of the launch, counted from 0
    uint64_t blocks;
    unsigned cluster = 1;  // blocks of each
    std::map<uint64_t, std::shared_ptr<struct Cluster>> clusters;  // live ones, by their last block; under the mutex
    std::atomic<bool> too_few_workers{false};
    std::atomic<uint64_t> next{0};      // the next block to deal out
    std::atomic<uint64_t> stop{~0ull};  // no block beyond this one matters: it ended the launch
    std::atomic<uint64_t> done{0};      // blocks that ran to their end
    std::mutex mutex;
    std::condition_variable worker_ended;
    size_t working = 0;  // OS threads
};

struct Block {
    Worker* worker;
    Launch* launch;
    uint64_t number, last;  // of its cluster
    int rank;  // in it
    std::shared_ptr<struct Cluster> cluster;  // null while it has not used it, where it is alone there
    bool in_vain;  // somebody waits in vain: the cluster's other blocks get their turn
    int threads, warps, alive;
    int clocks;  // how many there are
    bool ended;  // by a fatal finding
    Warp* warp;  // warps of them
    Lane* lane;  // threads of them
    Barrier barriers[BARRIERS];
    Registers registers;
    std::vector<struct Event>* events;  // events.h; null: they are not kept
    typedef std::vector<std::pair<struct Word*, uint32_t>> Learnt;
    Learnt learnt;          // of other blocks, by whichever thread (ordering.h)
    struct Look { struct Word* word; uint32_t count, thread, time; };
    std::vector<Look> looked, acquired;  // by which thread, and when: acquired by a fence behind the look
    uint8_t published = 0;  // how often, more or less
    std::atomic<bool> holds{false};  // until the others have looked (ordering.cpp)
    bool fences = false;    // there was a fence_proxy_async, of any kind
    bool global_fences = false;  // and of global memory
    std::vector<struct BulkStore*> writing;  // its stores that may not have written global memory yet (a watched build)
};

struct SharedWindow {     // where this worker's shared memory lies
    uintptr_t low, high;  // of the module's thread_local segment
    uintptr_t base;       // address 0 of the 32-bit shared address space, 1024-byte aligned
    uintptr_t dynamic;    // `extern __shared__`
};

class SharedShadow;
class Warpgroups;
class Sites;
class Mbarriers;

struct Worker {  // an OS thread that runs blocks
    pthread_t thread;
    Launch* launch;
    Fiber scheduler;
    Block block;
    Lane* lanes;  // MAX_THREADS or fewer, reused by each block
    std::vector<Warp> warps;
    SharedWindow window;
    uint3* thread_idx;  // this OS thread's threadIdx
    SharedShadow* shadow;
    Warpgroups* warpgroups;
    Mbarriers* mbarriers;
    Sites* sites;
    sigjmp_buf escape;              // how a signal handler leaves a lane
    bool alive = false;             // its OS thread (faults.cpp)
    int held[2] = {-1, -1};         // of global memory: see GlobalShadow::hold
    volatile bool in_lane = false;  // a lane runs, not the scheduler
    volatile bool inside = false;   // the running lane is inside the runtime
    Lane* volatile running = nullptr;
    std::atomic<uint32_t> in_vain{0};  // how often a lane has looked, or slept, in vain
    uint64_t samples[8] = {};          // of the running lane's registers (faults.cpp)
    uint32_t sampled = 0;
    std::string* printed;  // by the block that runs
    std::vector<struct Event>* events;
};

struct Settings {     // set by Python
    int threads = 2;  // OS threads
    size_t shared_limit = MAX_SHARED;
    int multiprocessors = 132;
    bool checked = false;  // a watched build
    uint64_t timeline = 0;  // of how many blocks the events are kept
    const void* stream = nullptr;  // that the entry is given, if it takes one
};
extern Settings settings;

// ---- who am I -----------------------------------------------------------------------------------
// All stacks of a launch lie in one region, so that the stack pointer says which lane is running; outside of
// it is host code, which the emulator leaves alone.
extern uintptr_t stacks_low, stacks_bytes;
extern Lane* all_lanes;
inline __attribute__((always_inline)) Lane* current_lane() {
    uintptr_t at = (uintptr_t)__builtin_frame_address(0) - stacks_low;
    return at < stacks_bytes ? &all_lanes[at / STACK_STRIDE] : nullptr;
}

void settle_store(Lane* lane);  // values.cpp

// Marks the time that a lane spends inside the runtime: it must not be torn out of there (faults.cpp).
struct Inside {
    Worker* worker;
    // settle: a store whose hook has run has been done by now.
    Inside(Lane* lane, uintptr_t pc, bool settle = true) : worker(lane->block->worker) {
        worker->inside = true, lane->pc = pc, lane->calls++;
        if (__builtin_expect(settle && lane->store.bytes != 0, 0)) settle_store(lane);
    }
    ~Inside() { worker->inside = false; }
};
#define CALLER ((uintptr_t)__builtin_return_address(0))

// For what only a kernel may call: the lane, or the end of the host part that has called it (host_part.cpp).
[[noreturn]] void called_on_host(uintptr_t pc);
inline __attribute__((always_inline)) Lane* kernel_lane(uintptr_t pc) {
    Lane* me = current_lane();
    if (__builtin_expect(!me, 0)) called_on_host(pc);
    return me;
}
#define ENTER_FROM_KERNEL(me)       \
    Lane* me = kernel_lane(CALLER); \
    Inside inside(me, CALLER)

// ---- scheduler.cpp ------------------------------------------------------------------------------
void wait_for_others(Lane* me, State state);  // the lane stops here until it is made runnable
void make_runnable(Lane* lane);
void let_others_run(Lane* me);
void look(Lane* me, uintptr_t word, int bytes);  // it looks at a word that others may write: perhaps it waits for them
void wait_in_vain(Lane* me);                     // it does wait for somebody: all others get their turn
void stop_launch(Block* block, int error);          // after a fatal finding: no later block matters any more
[[noreturn]] void end_launch(Lane* me, int error);  // the same, and the lane that runs stops for good
void release_stacks();

// ---- barrier.cpp, deadlock.cpp, collectives.cpp, matrix.cpp -------------------------------------
void thread_gone(Block* block);     // it has exited, and others may wait for it
void lane_gone(Warp* warp);         // the same
void file_deadlock(Block& block);   // nobody can go on: who waits, and for what
const char* collective_name(int op, int param);
// A lane's part in a collective: what simt_warp does, for those that have a function of their own.
void join_collective(Lane* me, int op, unsigned mask, const void* in, void* out, int param);
void load_matrix(Warp* warp, const Slot& slot);  // when the lanes have met
void store_matrix(Warp* warp, const Slot& slot);
void multiply(Warp* warp, const Slot& slot);

}  // namespace simt
