// The names of events: see events.h.
#include "events.h"

namespace simt {

const char* const DID_NAME[DIDS] = {"wgmma",         "commit",       "wait",           "wait-end", "execute",
                                    "arrive",        "mbarrier-wait", "mbarrier-passed", "load",     "store",
                                    "barrier",       "barrier-passed", "barrier-arrive", "registers"};

}  // namespace simt
