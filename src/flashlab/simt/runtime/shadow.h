// The shadow of shared memory: for every two bytes, who wrote them last, who has read them since, whether
// they hold anything yet, and whether a cp.async is still on its way to them.
//
// Two accesses to the same bytes, one of them a write, are a race unless one happens before the other. What
// orders them is only a barrier (of the block: __syncthreads; of a warp: __syncwarp). Each warp has a clock
// that ticks at its barriers, and knows of every other warp up to which of its ticks everything is visible: a
// vector clock. An access is stamped with the thread and the warp's time, so that the question "did it happen
// before what I do now?" is one comparison.
#pragma once
#include "counters.h"

namespace simt {

struct Stamp {
    uint64_t time : 26;  // of the warp; 0: no such access
    uint64_t thread : 10;
    uint64_t site : 20;
    uint64_t bytes : 2;  // which of the two
    uint64_t atomic : 1;
    uint64_t execution : 5;  // how often the lane had come to the site, the lowest bits
};
struct Cell {
    Stamp write;
    Stamp read[2];     // two are enough: see keep_two
    uint16_t copying;  // a cp.async or a TMA load is in flight, issued by thread copying - 1; or MBARRIER
    uint8_t full;      // which of the two bytes hold something
    uint8_t async;     // the last write was the async proxy's (proxy.h)
    uint16_t fences;  // how many fence_proxy_async its thread had done, the lowest bits; of an async write: which of
    // the block's clocks has its time (clocks.h)
};
constexpr uint16_t MBARRIER = 0xffff;  // the bytes are an mbarrier's

// Of the readers since the last write keep two. A later write conflicts with some reader exactly when it
// conflicts with one of these: readers of two different warps catch a writer of any warp, and two different
// lanes catch a writer of their own warp. A newer read of a warp stands for its older ones.
// ordered(s): it came before `now`, or there is none.
template <class S, class F>
inline void keep_two(S (&read)[2], const S& now, F ordered) {
    S &first = read[0], &second = read[1];
    if (first.thread == now.thread || ordered(first)) {
        if (second.thread == now.thread) second = S();
        first = now;
    } else if (second.thread == now.thread || ordered(second) ||
               (first.thread / WARP == second.thread / WARP && first.thread / WARP != now.thread / WARP)) {
        second = now;
    }
}

// EXCHANGE: an atomic that needs no value. COPY_ISSUED: cp.async. Of the async proxy: BULK_ISSUED, a load that begins
// to write here; PROXY_READ, an operation that begins to read here (it is noted as a read when it has ended).
// Of global memory: VOLATILE_STORE, and VOLATILE_UPDATE, of what a volatile load has read there.
enum Access : uint8_t {
    READ,
    WRITE,
    ATOMIC,
    EXCHANGE,
    COPY_ISSUED,
    BULK_ISSUED,
    PROXY_READ,
    VOLATILE_STORE,
    VOLATILE_UPDATE
};
inline bool is_atomic(Access a) { return a == ATOMIC || a == EXCHANGE || a == VOLATILE_STORE || a == VOLATILE_UPDATE; }

// The static __shared__ arrays of the module, as its symbol table gives them.
struct StaticArray {
    uint64_t offset, bytes;  // in the module's thread_local segment
    uint64_t kernel;  // whose own it is, as an address in the module; 0: of a function that several call
};
extern std::vector<StaticArray> static_arrays;
extern size_t dynamic_shift;  // `extern __shared__` begins so many bytes behind simt_dynamic_shared

// An access to a block's memory by a thread of another block of its cluster (cluster.cpp).
struct RemoteAccess {
    uintptr_t pc = 0;  // 0: none
    const char* how = "";
    uint64_t block = 0;
    int rank = 0, thread = 0;
    uint32_t time = 0, arrivals = 0;  // of its warp; at the cluster barrier, by the thread
};
struct RemoteWord {  // 4 bytes: the last write, and reads since
    RemoteAccess write, read[2];
};

// What an operation of the async proxy (a TMA store, a wgmma) reads of shared memory while it is under way: ranges
// that begin and end at multiples of 16 bytes.
struct AsyncRead {
    const char* how;
    int thread, site;  // that issued it
    std::vector<std::pair<uint32_t, uint32_t>> ranges;  // address, bytes
};

const char* verb(const Sites& sites, const Stamp& s, bool write);  // how it was done

class SharedShadow {
public:
    SharedShadow(const SharedWindow& window, uint64_t kernel);  // the one that runs; 0 where that is not known
    ~SharedShadow();
    void begin_block(size_t dynamic_bytes);
    // `address` is a shared address. False when the bytes lie in no array; the finding has then been filed.
    bool in_bounds(Lane* lane, uint64_t address, int bytes, const char* how) {
        if (address >= dynamic ? address + bytes <= dynamic_end
                               : owner[address / 2] && owner[address / 2] == owner[(address + bytes - 1) / 2])
            return true;
        file_out_of_bounds(lane, address, bytes, how);
        return false;
    }
    // Looks for conflicts with earlier accesses to these bytes, and notes this one. Where a store meets a
    // store it fills in `conflict` and returns true; it files the rest.
    bool touch(Lane* lane, uint64_t address, int bytes, Access access, int site, const char* how, Conflict* conflict);
    // The same of a thread of another block, which has waited at the cluster barrier before.
    void touch_remotely(Lane* lane, const Block* owner, uint64_t address, int bytes, bool writes, const char* how);
    // The async proxy is about to read pieces of 16 bytes for a warp: files what is not there yet, or not for it.
    void check_pieces(Warp* warp, const std::vector<uint32_t>& pieces, const char* how, uintptr_t pc);
    // An arrival of this warp, whose time has gone on, does not wait for what its ldmatrix load: that is read later.
    void still_loading(const Warp* warp);
    bool watched = false;  // a wgmma of this block has read shared memory, or is going to
    void land(Lane* lane, uint64_t address, int bytes, int site);  // a cp.async that was checked when issued
    // A load of the async proxy, the same; who knows that clock at that time may read it.
    void land_bulk(uint64_t address, int bytes, int clock, uint32_t time);

    // From here on, whoever writes to these bytes is told ("stage-overwritten"). The reads themselves are checked now.
    AsyncRead* begin_read(Lane* lane, AsyncRead read);
    // What it is to write, by `how`, where the async proxy may be reading: too early. But where nothing has been written
    // yet, it is the reader that is.
    const char* overwrites(uint32_t address, const char* how) const;
    // It has ended, as `by` has learnt: from here on they are reads of that lane, at its time. Null: nobody's.
    void end_read(AsyncRead* read, const Lane* by);

    // An mbarrier is made or ended: until then its 8 bytes may not be touched by anything else.
    void make_mbarrier(Lane* lane, uint32_t address, int site);
    void end_mbarrier(uint32_t address);

private:
    // Looks for conflicts with accesses from other blocks; true: one has been filed.
    bool meets_remote(Lane* lane, const Block* owner, uint64_t address, int bytes, bool writes, const char* how,
                      uintptr_t pc);
    bool file_if_read(Lane* lane, uint64_t address, int bytes, const char* how);
    bool file_if_loading(Lane* lane, uint64_t address, int bytes, const char* how);
    void file_out_of_bounds(Lane* lane, uint64_t address, int bytes, const char* how);
    SharedWindow window;
    Cell* cells;  // mapped, so that what is never touched costs nothing
    size_t count;
    std::unordered_map<uint32_t, RemoteWord> remote;  // by address / 4
    std::unordered_map<uint32_t, Stamp> late;  // reads that an arrival has left under way, by address / 16
    bool reading = false;  // there is one under way:
    std::vector<AsyncRead*> async_reads;
    std::vector<uint16_t> being_read;  // by how many of them, every 16 bytes
    uint64_t dynamic, dynamic_end;  // shared addresses
    std::vector<uint16_t> owner;  // for every two bytes below `dynamic`: which static array they belong to; 0 is none
};

}  // namespace simt
