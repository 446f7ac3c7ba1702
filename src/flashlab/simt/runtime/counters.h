// What is counted, and where. Every instruction that the emulator sees has a site: its return address and its
// kind. A site holds a few counters; the report adds them up by line and by kernel.
//
// A GPU issues an instruction once for a warp, and its cost depends on the addresses of all 32 lanes together. Here
// lanes run one after the other, so a load of one lane is filed until the same execution (the k-th since the lanes last
// met) of the other lanes has come in: that is the request of the warp. The result depends on no scheduling.
#pragma once
#include "machine.h"

namespace simt {

#define SIMT_KINDS(OF)                                                                                     \
    OF(SHARED_LOAD, shared_load) OF(SHARED_STORE, shared_store) OF(GLOBAL_LOAD, global_load)               \
    OF(GLOBAL_STORE, global_store) OF(CP_ASYNC, cp_async) OF(SHARED_ATOMIC, shared_atomic)                 \
    OF(GLOBAL_ATOMIC, global_atomic) OF(LDMATRIX, ldmatrix) OF(STMATRIX, stmatrix)                         \
    OF(MMA_M16N8K16, mma_m16n8k16) OF(MMA_M16N8K8, mma_m16n8k8) OF(TMA_LOAD, tma_load)                     \
    OF(TMA_STORE, tma_store) OF(TMA_REDUCE, tma_reduce) OF(BULK_LOAD, bulk_load) OF(BULK_STORE, bulk_store) \
    OF(MBARRIER_WAIT, mbarrier_wait) OF(MBARRIER_ARRIVE, mbarrier_arrive) OF(MBARRIER_INIT, mbarrier_init) \
    OF(SHUFFLE, shuffle) OF(VOTE, vote) OF(SYNC_WARP, syncwarp) OF(BARRIER, barrier) OF(WGMMA_WAIT, wgmma_wait)  \
    OF(CLUSTER_LOAD, cluster_load) OF(CLUSTER_STORE, cluster_store)
#define SIMT_KIND(kind, name) kind,
enum Kind : uint8_t {
    SIMT_KINDS(SIMT_KIND)
    WGMMA_M64N8K16,  // and 31 more: the shape with 8 n columns is WGMMA_M64N8K16 + n - 1
    KINDS = WGMMA_M64N8K16 + 32
};
// The meaning of a site's four counters: narrator.py has their names, and report.py says what they count. A sector whose
// halves a 16-byte cp.async sends to two 128-byte lines of shared memory is fetched twice; an H200's counters say so.
constexpr int COUNTERS = 4;
std::string kind_name(int kind);

struct Site {
    uintptr_t pc;
    Kind kind;
    uint64_t count[COUNTERS];
};

class Sites {  // one a worker: no locks
public:
    Sites() { rehash(256); }
    int find(uintptr_t pc, Kind kind);
    Site& operator[](int site) { return sites[site]; }
    const std::vector<Site>& all() const { return sites; }

private:
    std::vector<Site> sites;
    std::vector<int> table;  // open addressing; -1 is free
    size_t mask = 0;
    void rehash(size_t size);
};

// Files one lane's part of a load, store, copy or atomic of the warp; `address` is a shared address for the
// shared kinds, NO_ADDRESS where the lane moves no bytes (a cp.async that only fills with zeros).
// A cp.async's address carries where it goes: its 128-byte line of shared memory, from bit 48 on.
constexpr uint64_t NO_ADDRESS = ~0ull;
uint32_t executions(const Lane* lane, int site);  // of an instruction by this lane, since the lanes last met
void count_access(Lane* lane, int site, uint64_t address, int bytes);
// The lanes have met: what is incomplete now stays so (lanes that did not take part).
void count_incomplete(Warp* warp);

// How many times shared memory is accessed for one request. It has 32 banks, 4 bytes wide; in one wavefront
// each bank gives one word to all lanes that want it. `ideal` is what would be left if no bank were asked for
// two words at a time.
struct Wavefronts {
    int needed, ideal;
};
Wavefronts shared_wavefronts(const uint64_t* address, uint32_t mask, int bytes, bool load);

}  // namespace simt
