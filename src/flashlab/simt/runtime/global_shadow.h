// The shadow of global memory that kernels may write: for every two or four bytes who wrote and who read them in
// this launch, and whether they hold anything yet.
//
// Threads of one block are ordered by its barriers, as in shared memory (shadow.h). Threads of different
// blocks are not ordered at all, but for what ordering.h says.
#pragma once
#include "global_memory.h"
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
    // Looks for conflicts with earlier accesses to these bytes, and notes this one. READ, WRITE, an atomic or a volatile
    // store; `execution`: how often the lane has come here before; async: of the async proxy. Fills in `conflict` where a
    // store meets a store; *watched becomes true where another store came before it in this launch.
    bool touch(Lane* lane, uintptr_t address, int bytes, Access access, uint32_t execution, const char* how,
               Conflict& conflict, bool* watched = nullptr, bool async = false);
    // A store of the async proxy that has not been waited for may still be going to write these bytes: files that, and
    // returns true. add: so do additions, which may come at any time.
    bool in_flight(Lane* lane, uintptr_t address, int bytes, bool writes, bool add, const char* how);
    // From its hook to the moment when it is looked at (values.h), a store has its 16 bytes to itself: what it has stored
    // is what lies there, however fast the other blocks are.
    void hold(Lane* lane, uintptr_t address, int bytes);
    void let_go(Worker* worker);
    // What a store has done, where `before` lay. True where these bytes have been stored with different values, by
    // anybody, since the first of the stores that nothing orders.
    bool changed(uintptr_t address, int bytes, const uint8_t* before);
    void written(uintptr_t address, size_t bytes);  // by the host part
    // The word that a lane waits for in vain, and who stored it last in this launch, as the facts of a finding.
    void name_word(uintptr_t address, Finding& f);

private:
    struct Cell;
    struct Region;
    Region* region_of(uintptr_t address, int bytes);
    struct Region {
        uintptr_t low, high;
        int argument, grain;  // bytes a cell
        // What a place is counted from: the argument, or the module, as its symbols are.
        uintptr_t origin() const { return argument < 0 ? module_base : low; }
        bool empty;
        Cell* cells;
        size_t count;
    };
    std::vector<Region> regions;
    uint32_t launch = 0;
};
extern GlobalShadow global_shadow;

}  // namespace simt
