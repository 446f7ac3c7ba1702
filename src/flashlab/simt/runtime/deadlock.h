// Nobody of the block can go on: who waits, and for what.
#pragma once
#include "machine.h"

namespace simt {

void file_deadlock(Block& block);

}  // namespace simt
