// The shadow of global memory that kernels may write: for every two or four bytes who wrote and who read them in
// this launch, and whether they hold anything yet.
//
// Threads of one block are ordered by its barriers, as in shared memory (shadow.h). Threads of different
// blocks are not ordered at all, but for what ordering.h says.
#pragma once
#include "ordering.h"
#include "shadow.h"

namespace simt {

class GlobalShadow {
public:
    // Bytes [low, high), of an argument (or -1: the module's variables) whose elements have `item` bytes.
    // empty: they hold nothing yet.
    void add(uintptr_t low, uintptr_t high, int argument, int item, bool empty);
    void begin_launch();
    void clear();  // the call is over
    // Looks for conflicts with earlier accesses to these bytes, and notes this one. READ, WRITE or ATOMIC;
    // `execution`: how often the lane has come here before. Fills in `conflict` where a store meets a store.
    bool touch(Lane* lane, uintptr_t address, int bytes, Access access, uint32_t execution, const char* how,
               Conflict& conflict);
    void written(uintptr_t address, size_t bytes);  // by the host part

private:
    struct Cell;
    struct Region {
        uintptr_t low, high;
        int argument, grain;  // bytes a cell
        bool empty;
        Cell* cells;
        size_t count;
    };
    std::vector<Region> regions;
    uint32_t launch = 0;
};
extern GlobalShadow global_shadow;

}  // namespace simt
