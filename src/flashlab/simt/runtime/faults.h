// Signals: what a kernel does to the process must not reach Python.
#pragma once
#include "machine.h"

namespace simt {

void start_watching(std::vector<Worker>& workers);  // installs the handlers
void stop_watching();                               // and puts the old ones back
void enter_worker(Worker* worker);                  // called by each OS thread of the launch
void leave_worker();
bool cancelled();

}  // namespace simt
