// Who runs: launches, blocks, and the switch from one lane to the next.
//
// Blocks are dealt out in order to a few OS threads. In a block the scheduler visits the warps in turn and lets one
// lane of each run; a lane that has to wait hands over to the next runnable lane of its warp, and the last one goes
// back to the scheduler. When nobody is runnable and somebody is alive, the block is deadlocked.
#include "bulk_store.h"
#include "cluster.h"
#include "faults.h"
#include "mbarrier.h"
#include "report.h"
#include "warpgroup.h"
#include <link.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>

namespace simt {

extern "C" {
__thread uint3 threadIdx, blockIdx, blockDim, gridDim;
}

uintptr_t stacks_low, stacks_bytes;
Lane* all_lanes;
Settings settings;
static std::map<const void*, int> opted_in;  // cudaFuncSetAttribute(MaxDynamicSharedMemorySize)
static std::map<const void*, int> non_portable;  // the same of clusters

// ---- from lane to lane --------------------------------------------------------------------------
static void switch_to(Worker* worker, Fiber& from, Lane* to) {
    worker->running = to;
    *worker->thread_idx = to->thread_idx;
    fiber_switch(from, to->fiber);
}
static void back_to_scheduler(Lane* me) {
    Worker* worker = me->block->worker;
    worker->in_lane = false;
    fiber_switch(me->fiber, worker->scheduler);
    worker->in_lane = true;
}
void make_runnable(Lane* lane) {
    lane->state = RUNNABLE;
    lane->warp->runnable |= 1u << lane->lane;
}
// The next runnable lane of the warp after this one, in a circle.
static Lane* next_in_warp(Lane* me) {
    const uint32_t r = me->warp->runnable & ~(1u << me->lane);
    if (!r) return nullptr;
    const uint32_t above = r & ~((2u << me->lane) - 1);
    return &me->warp->lanes[__builtin_ctz(above ? above : r)];
}
void wait_for_others(Lane* me, State state) {
    Worker* worker = me->block->worker;
    me->state = state;
    me->warp->runnable &= ~(1u << me->lane);
    me->accesses = 0;
    worker->inside = false;
    if (Lane* next = next_in_warp(me)) switch_to(worker, me->fiber, next);
    else back_to_scheduler(me);
    worker->inside = true;
}
void let_others_run(Lane* me) {
    Worker* worker = me->block->worker;
    const bool was_inside = worker->inside;
    me->accesses = 0;
    worker->inside = false;
    Lane* next = next_in_warp(me);
    // At the end of a round through the warp the other warps get their turn: a lane may be spinning on what they write.
    if (next && next->lane > me->lane) switch_to(worker, me->fiber, next);
    else back_to_scheduler(me);
    worker->inside = was_inside;
}
// Who looks at a word again and again, and sees the same, waits for another thread: of its block, or of another. That
// block may not have begun: run() looks at the number.
void wait_in_vain(Lane* me) {
    // The signal leaves alone whoever is in here, as it is nearly always.
    if (cancelled()) file_fatal(me, out_of_time(me), cudaErrorLaunchTimeout);
    me->block->worker->in_vain++, me->block->in_vain = true;
    let_others_run(me);
    sched_yield();
}
void look(Lane* me, uintptr_t word, int bytes) {
    uint64_t value = 0;
    memcpy(&value, (const void*)word, (size_t)std::min(bytes, 8));
    const bool same = word == me->polled && value == me->saw;
    me->polled = word, me->saw = value;
    me->in_vain = same ? me->in_vain + 1 : 0;
    if (me->in_vain % 16 == 15) wait_in_vain(me);
}
Finding out_of_time(Lane* me) {
    Finding f{cancelled() == 1 ? "timeout" : "interrupted"};
    if (!me->in_vain) return f;
    global_shadow.name_word(me->polled, f);
    f.value[1] = me->saw >> 32 ? (int64_t)me->saw : (int32_t)me->saw;
    f.pc = me->pc, f.thread = me->id, f.block = me->block->number;
    return f;
}
void stop_launch(Block* block, int error) {
    int none = 0;
    last_error.compare_exchange_strong(none, error);
    uint64_t stop = block->launch->stop;  // blocks before this one go on: the findings do not depend on luck
    while (block->number < stop && !block->launch->stop.compare_exchange_weak(stop, block->number)) {}
    block->ended = true;
}
void end_launch(Lane* any, int error) {
    Worker* worker = any->block->worker;
    stop_launch(&worker->block, error);
    worker->inside = worker->in_lane = false;
    Fiber nowhere;
    fiber_switch(nowhere, worker->scheduler);  // the stack of this lane is never looked at again
    __builtin_unreachable();
}

static void lane_main() {
    Lane* me = current_lane();
    me->block->launch->call(me->block->launch->closure);
    Block* block = me->block;
    Worker* worker = block->worker;
    worker->inside = true;
    if (me->store.bytes) settle_store(me);
    me->state = DONE;
    me->warp->runnable &= ~(1u << me->lane);
    me->warp->alive &= ~(1u << me->lane);
    block->alive--;
    lane_gone(me->warp);
    thread_gone(block);
    leave_cluster_barrier(me);
    worker->inside = false;
    if (Lane* next = next_in_warp(me)) switch_to(worker, me->fiber, next);
    else back_to_scheduler(me);
    __builtin_unreachable();
}

// ---- a block ------------------------------------------------------------------------------------
static void prepare_block(Worker* worker, Launch* launch, uint64_t number) {
    Block& block = worker->block;
    const dim3 g = launch->grid, b = launch->block;
    block.worker = worker;
    block.launch = launch;
    block.number = number;
    block.rank = (int)(number % launch->cluster), block.last = number - block.rank + launch->cluster - 1;
    block.in_vain = false;
    blockIdx = {(unsigned)(number % g.x), (unsigned)(number / g.x % g.y), (unsigned)(number / g.x / g.y)};
    block.threads = block.alive = (int)(b.x * b.y * b.z);
    block.warps = (block.threads + WARP - 1) / WARP;
    block.clocks = launch->cluster > 1 ? CLOCKS : block.warps;
    block.ended = block.fences = block.global_fences = false;
    block.learnt.clear(), block.looked.clear(), block.acquired.clear();
    block.writing.clear();
    block.published = 0;
    block.warp = worker->warps.data();
    block.lane = worker->lanes;
    for (Barrier& barrier : block.barriers) barrier.arrived = 0, barrier.waiting.clear();
    for (int i = 0; i < block.warps; i++) {
        Warp& w = block.warp[i];
        w.block = &block;
        w.index = i;
        w.lanes = worker->lanes + i * WARP;
        w.count = std::min(WARP, block.threads - i * WARP);
        w.alive = w.runnable = w.count == WARP ? ~0u : (1u << w.count) - 1;
        w.time = 1;
        w.slots_used = 0;
        w.loading.clear();
        (Clock&)w = Clock();
    }
    for (int t = 0; t < block.threads; t++) {
        Lane& lane = worker->lanes[t];
        (LaneOfBlock&)lane = LaneOfBlock();
        lane.block = &block;
        lane.warp = &block.warp[t / WARP];
        lane.id = t, lane.lane = t % WARP;
        lane.thread_idx = {t % b.x, t / b.x % b.y, t / b.x / b.y};
        // The frames of different lanes begin at different offsets, so that they do not compete for one cache set.
        fiber_prepare(lane.fiber, lane.stack, STACK - t * 320 % 8192, lane_main);
    }
    // Shared memory holds NaN (all bits set) until something is written there.
    const SharedWindow& window = worker->window;
    for (const StaticArray& a : static_arrays) memset((void*)(window.low + a.offset), 0xff, a.bytes);
    memset((void*)window.dynamic, 0xff, launch->shared_bytes);
    worker->shadow->begin_block(launch->shared_bytes);
    worker->warpgroups->begin_block();
    begin_registers(&block);
    block.events = number < settings.timeline ? worker->events : nullptr;
    worker->mbarriers->begin_block();
}

static bool resolve_activemask(Warp& w) {
    uint32_t waiting = 0;
    for (int l = 0; l < w.count; l++)
        if (w.lanes[l].state == IN_ACTIVEMASK) waiting |= 1u << l;
    if (!waiting) return false;
    uint32_t same = 0;  // those that stand at the same place as the first
    const void* line = w.lanes[__builtin_ctz(waiting)].in;
    for (int l = 0; l < w.count; l++)
        if ((waiting >> l & 1) && w.lanes[l].in == line) same |= 1u << l;
    for (int l = 0; l < w.count; l++)
        if (same >> l & 1) *(unsigned*)w.lanes[l].out = same, make_runnable(&w.lanes[l]);
    return true;
}

static void run_block(Worker* worker, Launch* launch, uint64_t number) {
    prepare_block(worker, launch, number);
    Block& block = worker->block;
    enter_cluster(&block);
    if (sigsetjmp(worker->escape, 1)) {  // a signal handler comes back here (faults.cpp)
        worker->in_lane = worker->inside = false;
        block.ended = true;
    }
    for (uint32_t round = 1; block.alive > 0 && !block.ended; round++) {
        bool any = false;
        for (int i = 0; i < block.warps && !block.ended; i++) {
            Warp& w = block.warp[i];
            if (!w.runnable) continue;
            any = true;
            worker->in_lane = true;
            switch_to(worker, worker->scheduler, &w.lanes[__builtin_ctz(w.runnable)]);
            worker->in_lane = false;
        }
        if (launch->stop <= block.last) break;  // an earlier block has ended the launch, or one of this cluster
        if (block.ended) break;
        if (any && block.cluster) {
            block.cluster->idle = 0;
            if ((block.in_vain || round % 4096 == 0) && !pass_turn(&block)) break;
            block.in_vain = false;
        }
        // Nobody can go on: wgmma end; if that helps nobody, copies land. Both happen after so long too, as somebody may
        // be spinning on what comes of them.
        const bool spinning = any && round % 4096 == 0;
        if (any && !spinning) continue;
        if (!any)
            for (int i = 0; i < block.warps; i++) any |= resolve_activemask(block.warp[i]);
        any |= worker->mbarriers->pass_waits(&block);
        if (!any || spinning) any |= worker->warpgroups->pass_waits();
        if (!any) any = pass_cluster_waits(&block);
        if (!any && block.alive > 0 && !wait_for_cluster(&block)) file_deadlock(*missing_in_cluster(&block));
    }
    global_shadow.let_go(worker);
    if (!block.ended && launch->stop > block.last) file_cluster_end(&block);
    if (!block.ended && launch->stop > block.last) {
        for (int t = 0; t < block.threads; t++) {
            const Lane& lane = block.lane[t];
            if (lane.first_copy == lane.copies.size()) continue;
            const Copy& copy = lane.copies[lane.first_copy];
            // 1: not even committed
            file(&block.lane[t],
                 {"never-waited", "cp.async", "", {copy.group == block.lane[t].group}, (*worker->sites)[copy.site].pc});
            break;
        }
        for (int t = 0; t < block.threads; t++)
            if (!block.lane[t].stores.empty()) finish_stores(&block.lane[t]);
        worker->mbarriers->file_unwaited(&block);
    }
    if (!block.ended && launch->stop > block.last) worker->warpgroups->file_never_waited(), file_registers(&block);
    for (int i = 0; i < block.warps; i++) count_incomplete(&block.warp[i]);
    if (block.events) record_events(number, *block.events), block.events->clear();
    leave_cluster(&block);
}

// ---- a worker -----------------------------------------------------------------------------------
static SharedWindow find_window() {
    SharedWindow window{};
    window.dynamic = (uintptr_t)dynamic_shared() + dynamic_shift;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* p) {
            SharedWindow& w = *(SharedWindow*)p;
            uintptr_t low = (uintptr_t)info->dlpi_tls_data;
            for (int i = 0; low && i < info->dlpi_phnum; i++) {
                if (info->dlpi_phdr[i].p_type != PT_TLS) continue;
                uintptr_t high = low + info->dlpi_phdr[i].p_memsz;
                if (w.dynamic >= low && w.dynamic < high) w.low = low, w.high = high;
            }
            return 0;
        },
        &window);
    window.base = window.low & ~(uintptr_t)1023;
    return window;
}

static void* worker_main(void* argument) {
    Worker* worker = (Worker*)argument;
    Launch* launch = worker->launch;
    worker->window = find_window();
    SharedShadow shadow(worker->window, launch->kernel ? (uint64_t)launch->kernel - module_base : 0);
    const auto warpgroups = std::make_unique<Warpgroups>(worker);  // too large for a stack
    std::string printed;
    Mbarriers mbarriers;
    worker->mbarriers = &mbarriers;
    worker->shadow = &shadow;
    worker->warpgroups = warpgroups.get();
    worker->printed = &printed;
    std::vector<Event> events;
    worker->events = &events;
    worker->thread_idx = &threadIdx;
    blockDim = launch->block, gridDim = launch->grid;
    enter_worker(worker);
    for (;;) {
        const uint64_t number = launch->next++;
        if (number >= launch->blocks || number > launch->stop || cancelled()) break;
        run_block(worker, launch, number);
        if (!worker->block.ended) launch->done++, progress->done++;
        if (!printed.empty()) record_printed(number, printed);
        printed.clear();
    }
    leave_worker();
    std::lock_guard<std::mutex> lock(launch->mutex);
    launch->working--;
    launch->worker_ended.notify_one();
    return nullptr;
}

// ---- a launch -----------------------------------------------------------------------------------
static void refuse(const Launch& launch, const char* text, int64_t value, int64_t limit, int error) {
    file_of_launch(launch.number, {"launch-configuration", "", text, {value, limit}}, error);
}

static void file_unfinished(const Launch& launch) {
    file_of_launch(
        launch.number,
        {cancelled() == 2 ? "interrupted" : "timeout", "launch", "", {(int64_t)launch.done, (int64_t)launch.blocks}},
        cudaErrorLaunchTimeout);
}

// The blocks of a cluster follow each other in x.
static bool configuration_error(const Launch& l, const void* kernel, uint3 cluster) {
    const uint64_t threads = (uint64_t)l.block.x * l.block.y * l.block.z;
    size_t allowed = 48 << 10;
    for (auto& k : opted_in)  // a launch with deduced template arguments has no address: any will do
        if (k.first == kernel || !kernel) allowed = std::max<size_t>(allowed, k.second);
    const struct {
        bool wrong;
        const char* text;
        uint64_t value, limit;
        int error = cudaErrorInvalidConfiguration;
    } rules[] = {
        {!l.grid.x || !l.grid.y || !l.grid.z, "grid-empty", 0, 0},
        {!threads, "block-empty", 0, 0},
        {l.grid.x > 2147483647u, "grid.x", l.grid.x, 2147483647u},
        {l.grid.y > 65535, "grid.y", l.grid.y, 65535},
        {l.grid.z > 65535, "grid.z", l.grid.z, 65535},
        {threads > MAX_THREADS, "threads", threads, MAX_THREADS},
        {l.block.z > 64, "block.z", l.block.z, 64},
        {l.shared_bytes > settings.shared_limit, "shared", l.shared_bytes, settings.shared_limit,
         cudaErrorInvalidValue},
        {l.shared_bytes > allowed, "shared-opt-in", l.shared_bytes, allowed, cudaErrorInvalidValue},
        {cluster.y != 1 || cluster.z != 1, "cluster-yz", cluster.y, cluster.z, cudaErrorInvalidClusterSize},
        {!cluster.x || cluster.x > MAX_CLUSTER, "cluster", cluster.x, MAX_CLUSTER, cudaErrorInvalidClusterSize},
        {cluster.x > PORTABLE_CLUSTER && !non_portable[kernel], "cluster-opt-in", cluster.x, PORTABLE_CLUSTER,
         cudaErrorInvalidClusterSize},
        {cluster.x && l.grid.x % cluster.x, "cluster-grid", l.grid.x, cluster.x},
    };
    for (auto& rule : rules)
        if (rule.wrong) return refuse(l, rule.text, (int64_t)rule.value, (int64_t)rule.limit, rule.error), true;
    return false;
}

// The stacks of all lanes lie in one region, which is kept for the next launch of the call.
static size_t stacks_ready;  // how many of them can be used

void release_stacks() {
    if (stacks_bytes) munmap((void*)stacks_low, stacks_bytes);
    stacks_low = stacks_bytes = stacks_ready = 0;
}
// How many stacks the system lets this process have: each is a mapping, and so is the gap before it.
static size_t stacks_allowed() {
    size_t limit = 65530, used = 0;
    if (FILE* f = fopen("/proc/sys/vm/max_map_count", "r")) {
        if (fscanf(f, "%zu", &limit) != 1) limit = 65530;
        fclose(f);
    }
    if (FILE* f = fopen("/proc/self/maps", "r")) {
        for (int c; (c = fgetc(f)) != EOF;) used += c == '\n';
        fclose(f);
    }
    used += 512;
    return limit > used ? (limit - used) / 2 : 0;
}
// Room for `wanted` stacks, or as many as there is; returns how many there are.
static size_t reserve_stacks(size_t wanted) {
    if (stacks_bytes >= wanted * STACK_STRIDE) return wanted;
    release_stacks();
    wanted = std::min(wanted, stacks_allowed());
    void* region = MAP_FAILED;
    for (; wanted; wanted /= 2) {
        region = mmap(nullptr, wanted * STACK_STRIDE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (region != MAP_FAILED) break;
    }
    if (region == MAP_FAILED) return 0;
    stacks_low = (uintptr_t)region, stacks_bytes = wanted * STACK_STRIDE;
    return wanted;
}
// Makes the first so many of them stacks; false where the system does not let it.
static bool make_stacks(size_t wanted) {
    for (; stacks_ready < wanted; stacks_ready++)  // what lies below each stays a guard
        if (mprotect((void*)(stacks_low + stacks_ready * STACK_STRIDE + STACK_GUARD), STACK, PROT_READ | PROT_WRITE))
            return false;
    return true;
}

// How many blocks of the launch a GPU has at a time, more or less: so many may wait for each other.
static size_t resident(const Launch& l, size_t lanes) {
    rlimit space;  // threads and stacks take addresses: where these are few, no more than are asked for
    if (!getrlimit(RLIMIT_AS, &space) && space.rlim_cur != RLIM_INFINITY) return 0;
    const size_t by_shared = (settings.shared_limit + 1024) / (l.shared_bytes + 1024);
    const size_t per_sm = std::max<size_t>(1, std::min({(size_t)32, 2048 / lanes, by_shared}));
    return std::min<uint64_t>(l.blocks, per_sm * (size_t)settings.multiprocessors);
}

// The OS threads of a launch. As many as there are processors, each with a block; and more, twice as many each time,
// when all of their blocks wait for somebody, which can only be a block that has not begun. Whoever spins on what
// nobody sees (a volatile load, in a fast build) is known by its registers: they come back to what they were. And if no
// block ends for a second, a few more are tried in any case.
class Workers {
public:
    Workers(Launch& launch, size_t lanes, size_t most) : launch(launch), lanes(lanes), most(most) {
        all_lanes = storage = std::allocator<Lane>().allocate(most * lanes);
        watch(&workers);
    }
    ~Workers() {
        watch(nullptr);
        for (Sites& s : sites) record_counts(s);
        all_lanes = nullptr;
        for (size_t i = 0; i < workers.size() * lanes; i++) storage[i].~Lane();
        std::allocator<Lane>().deallocate(storage, most * lanes);
    }
    bool start() {  // one more; false where the system has no more threads, or stacks: fewer do the same work
        const size_t i = workers.size();
        if (i >= most || !make_stacks((i + 1) * lanes)) return false;
        for (size_t l = i * lanes; l < (i + 1) * lanes; l++)
            (new (&storage[l]) Lane())->stack = (uint8_t*)stacks_low + l * STACK_STRIDE + STACK_GUARD;
        sites.emplace_back();
        Worker& w = one_more(workers);
        w.launch = &launch, w.lanes = storage + i * lanes, w.sites = &sites.back();
        w.warps.resize(lanes / WARP);
        {
            std::lock_guard<std::mutex> lock(launch.mutex);
            launch.working++;
        }
        if (!pthread_create(&w.thread, nullptr, worker_main, &w)) {
            started++;
            return true;
        }
        std::lock_guard<std::mutex> lock(launch.mutex);
        launch.working--;
        most = workers.size();
        return false;
    }
    size_t join(size_t count) {  // waits for the end of the launch; how many there have been
        uint64_t done = 0;
        int idle = 0;  // steps in which no block has ended
        for (size_t usual = 4 * count;;) {
            std::unique_lock<std::mutex> lock(launch.mutex);
            launch.worker_ended.wait_for(lock, std::chrono::milliseconds(STEP), [this] { return !launch.working; });
            const size_t working = launch.working;
            if (!working) break;
            lock.unlock();
            if (launch.done != done) done = launch.done, idle = 0;
            if (++idle < 4 || launch.stop != ~0ull || cancelled()) continue;
            if (idle % (32 * workers.size()) == 4) forget();
            const bool waiting = all_in_vain();
            if (workers.size() >= most || launch.next >= launch.blocks) continue;
            if (!waiting && (idle % (1000 / STEP) || workers.size() >= usual)) continue;
            for (size_t more = workers.size(); more && start(); more--) {}
        }
        for (size_t i = 0; i < started; i++) pthread_join(workers[i].thread, nullptr);
        return started;
    }

private:
    static constexpr int STEP = 10;  // milliseconds
    bool all_in_vain() {
        bool all = true;
        for (size_t i = 0; i < started; i++) {
            Worker& w = workers[i];
            all &= w.in_vain >= 2 || !w.alive;
            sample(&w);
        }
        if (all) forget();
        return all;
    }
    void forget() {
        for (size_t i = 0; i < started; i++) workers[i].in_vain = 0;
    }
    Launch& launch;
    const size_t lanes;
    size_t most, started = 0;
    Lane* storage;
    std::deque<Sites> sites;
    std::deque<Worker> workers;
};

static void run(Launch& launch, size_t count) {
    const size_t lanes = ((size_t)launch.block.x * launch.block.y * launch.block.z + WARP - 1) / WARP * WARP;
    const size_t least = launch.cluster;
    count = std::min<uint64_t>(launch.blocks, count * least);
    const size_t room = reserve_stacks(std::max(count, resident(launch, lanes)) * lanes), most = room / lanes;
    if (most < least || !make_stacks(least * lanes))
        return refuse(launch, "memory", (int64_t)(least * lanes), (int64_t)(most ? stacks_ready : room),
                      cudaErrorMemoryAllocation);
    global_shadow.begin_launch();
    size_t started = 0;
    {
        Workers workers(launch, lanes, most);
        while (started < count && workers.start()) started++;
        launch.too_few_workers = started < least;
        started = workers.join(count);
    }
    show_printed();
    if (started < least) return refuse(launch, "os-threads", 0, 0, cudaErrorMemoryAllocation);
    // A launch that Python has cancelled is a success only if nothing of it is missing.
    if (launch.done < launch.blocks && launch.stop == ~0ull) file_unfinished(launch);
}

static void file_wrong_stream(const char* what, uintptr_t pc, int launch) {
    file_of_launch(launch, {"wrong-stream", "", what, {}, pc}, cudaSuccess);
}
extern "C" void simt_in_stream(const char* what, const void* stream) {
    if (settings.stream && stream != settings.stream) file_wrong_stream(what, CALLER, (int)progress->launches);
}

extern "C" void simt_launch(const char* text, const void* kernel, uint3 grid, uint3 block, size_t shared_bytes,
                            const void* stream, void (*call)(const void*), const void* closure, size_t closure_bytes,
                            int checked, uint3 cluster) {
    if (Lane* me = current_lane()) {
        Inside inside(me, CALLER);
        file_fatal(me, {"launch-in-kernel", "", text});
    }
    if (last_error == cudaErrorIllegalAddress || last_error == cudaErrorLaunchFailure ||
        last_error == cudaErrorLaunchTimeout)
        return;
    Launch launch;
    launch.grid = grid, launch.block = block;
    launch.shared_bytes = shared_bytes;
    launch.call = call, launch.closure = closure, launch.closure_bytes = closure_bytes;
    launch.checked = checked, launch.kernel = kernel;
    launch.blocks = (uint64_t)grid.x * grid.y * grid.z;
    launch.number = record_launch(text, kernel, launch);
    if (configuration_error(launch, kernel, cluster)) return;
    launch.cluster = cluster.x;
    if (settings.stream && stream != settings.stream) file_wrong_stream("", CALLER, launch.number);
    progress->done = 0, progress->blocks = launch.blocks;
    strncpy(progress->kernel, text, sizeof progress->kernel - 1);
    progress->launches++;
    if (cancelled()) return file_unfinished(launch);
    run(launch, (size_t)std::max<uint64_t>(1, std::min<uint64_t>((uint64_t)settings.threads, launch.blocks)));
}
extern "C" int simt_last_error(int forget) {
    const int error = last_error;
    if (forget) last_error = 0;
    return error;
}
extern "C" int simt_func_attribute(const void* kernel, int attribute, int value) {
    if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) non_portable[kernel] = value;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || (size_t)value > settings.shared_limit) return last_error = cudaErrorInvalidValue;
    opted_in[kernel] = value;
    return cudaSuccess;
}
extern "C" int simt_active_clusters(unsigned blocks, size_t shared_bytes) {
    return blocks && shared_bytes <= settings.shared_limit ? settings.multiprocessors / (int)blocks : 0;
}
extern "C" int simt_device_attribute(int attribute) {
    switch (attribute) {
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return (int)settings.shared_limit;
    // Of each block the system keeps 1 KB, so that a block can have all of an SM's but that.
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return (int)settings.shared_limit + 1024;
    case cudaDevAttrMultiProcessorCount: return settings.multiprocessors;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    default: return 0;
    }
}

}  // namespace simt
