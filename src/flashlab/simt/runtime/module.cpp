// What each module has of its own: everything else of the runtime is one library, which all of them use.
#include "machine.h"

// What every `extern __shared__` array of the module is an alias of (the linker makes it so). 1 KB more than
// a block may ask for, so that just beyond the end there is still something to protect.
extern "C" {
alignas(1024) thread_local char simt_dynamic_shared[simt::MAX_SHARED + 1024];
char* simt_module() { return simt_dynamic_shared; }  // of the calling thread
}

// What it is an alias of where the arrays are declared with a smaller alignment (build.py).
#define SIMT_BEHIND(n) \
    asm(".globl simt_dynamic_shared_" #n "\n.set simt_dynamic_shared_" #n ", simt_dynamic_shared + " #n \
        "\n" \
        ".type simt_dynamic_shared_" #n ", @tls_object");
SIMT_BEHIND(1)
SIMT_BEHIND(2)
SIMT_BEHIND(4) SIMT_BEHIND(8) SIMT_BEHIND(16) SIMT_BEHIND(32) SIMT_BEHIND(64) SIMT_BEHIND(128) SIMT_BEHIND(256)
    SIMT_BEHIND(512)
