// What happens when the lanes of a collective have met: see collectives.cpp and matrix.cpp.
#pragma once
#include "machine.h"

namespace simt {

const char* collective_name(int op, int param);
// A lane's part in a collective: what simt_warp does, for those that have a function of their own.
void join_collective(Lane* me, int op, unsigned mask, const void* in, void* out, int param);

// matrix.cpp
void load_matrix(Warp* warp, const Slot& slot);
void store_matrix(Warp* warp, const Slot& slot);
void multiply(Warp* warp, const Slot& slot);

}  // namespace simt
