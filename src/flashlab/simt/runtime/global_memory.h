// Global memory: the buffers that the caller passed to the launch, and everything else a pointer may lead to.
#pragma once
#include "findings.h"

namespace simt {

struct Buffer {
    uintptr_t low, high;
    bool writable;
    int number;  // of the argument
};
extern std::vector<Buffer> buffers;  // they may overlap

// Is this access allowed? Files the finding where not; an access outside of every buffer ends the launch.
// Returns whether it is an access to a buffer, which is to be counted.
bool check_global(Lane* lane, uintptr_t address, int bytes, bool write, const char* how);
void describe_address(Finding& f, uintptr_t address, int bytes);  // for an illegal one: what is it near?
extern char* (*dynamic_shared)();                                 // the module's own function (module.cpp)
void find_module();                                               // where its code and data lie
bool in_module(uintptr_t address);
std::vector<std::pair<uintptr_t, uintptr_t>> module_variables();  // where those that can be written lie
extern uintptr_t module_base;

}  // namespace simt
