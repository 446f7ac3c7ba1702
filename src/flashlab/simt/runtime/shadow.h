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
    Stamp read[2];     // two are enough: see shadow.cpp
    uint16_t copying;  // a cp.async is in flight, issued by thread copying - 1
    uint8_t full;      // which of the two bytes hold something
};

enum Access : uint8_t { READ, WRITE, ATOMIC, EXCHANGE, COPY_ISSUED };  // EXCHANGE: an atomic that needs no value
inline bool is_atomic(Access a) { return a == ATOMIC || a == EXCHANGE; }

// The static __shared__ arrays of the module, as its symbol table gives them.
struct StaticArray {
    uint64_t offset, bytes;  // in the module's thread_local segment
    uint64_t kernel;         // whose own it is, as an address in the module; 0: of a function that several call
};
extern std::vector<StaticArray> static_arrays;

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
    // The async proxy is about to read pieces of 16 bytes for a warp: files what is not there yet, or not for it.
    void check_pieces(Warp* warp, const std::vector<uint32_t>& pieces, const char* how, uintptr_t pc);
    bool watched = false;  // a wgmma of this block has read shared memory, or is going to
    void land(Lane* lane, uint64_t address, int bytes, int site);  // a cp.async that was checked when issued

private:
    void file_out_of_bounds(Lane* lane, uint64_t address, int bytes, const char* how);
    SharedWindow window;
    Cell* cells;  // mapped, so that what is never touched costs nothing
    size_t count;
    uint64_t dynamic, dynamic_end;  // shared addresses
    std::vector<uint16_t>
        owner;  // for every two bytes below `dynamic`: which static array they belong to; 0 is none
};

}  // namespace simt
