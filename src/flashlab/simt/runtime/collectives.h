// What happens when the lanes of a collective have met: see collectives.cpp and matrix.cpp.
#pragma once
#include "machine.h"

namespace simt {

const char* collective_name(int op, int param);

// matrix.cpp
void load_matrix(Warp* warp, const Slot& slot);
void store_matrix(Warp* warp, const Slot& slot);
void multiply(Warp* warp, const Slot& slot);

}  // namespace simt
