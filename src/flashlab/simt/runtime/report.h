// What is kept of each launch until Python asks for it.
#pragma once
#include "counters.h"
#include <string>

namespace simt {

int record_launch(const char* text, const void* kernel, const Launch& launch);  // its number
void record_counts(const Sites& sites);                                         // of the last launch
void record_printed(int launch, uint64_t block, const std::string& text);

}  // namespace simt
