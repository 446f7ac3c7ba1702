// Signals: what a kernel does to the process must not end it before Python knows.
#pragma once
#include "machine.h"
#include <signal.h>

namespace simt {

constexpr int CANCEL = SIGURG;  // ignored by default, so that a late one does no harm

void install_handlers();                      // of the process; again before each call
void enter_thread();                          // gives this OS thread a stack for its handlers
void leave_thread();
void enter_worker(Worker* worker);            // called by each OS thread of a launch
void leave_worker();
void watch(std::deque<Worker>* workers);      // those of the launch that runs; null: none
Worker& one_more(std::deque<Worker>& workers);
void sample(Worker* worker);                  // counts `in_vain` where its registers are what they were
void cancel(int reason);                      // 1: it took too long, 2: the user interrupted it, 0: begin anew
int cancelled();                              // the reason

}  // namespace simt
