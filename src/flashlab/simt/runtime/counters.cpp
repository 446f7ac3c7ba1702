// Sites, and the grouping of lanes' accesses into requests of the warp: see counters.h.
#include "counters.h"
#include <algorithm>

namespace simt {

std::string kind_name(int kind) {
#define SIMT_KIND_NAME(kind, name) #name,
    static const char* const NAME[] = {SIMT_KINDS(SIMT_KIND_NAME)};
    if (kind < WGMMA_M64N8K16) return NAME[kind];
    return "wgmma_m64n" + std::to_string(8 * (kind - WGMMA_M64N8K16 + 1)) + "k16";
}

// ---- sites --------------------------------------------------------------------------------------
static inline size_t hash(uintptr_t pc, Kind kind) { return (pc * 64 + kind) * 0x9e3779b97f4a7c15ull >> 20; }

int Sites::find(uintptr_t pc, Kind kind) {
    for (size_t i = hash(pc, kind) & mask;; i = (i + 1) & mask) {
        int s = table[i];
        if (s < 0) {
            sites.push_back({pc, kind, {}});
            table[i] = (int)sites.size() - 1;
            if (sites.size() * 2 > table.size()) rehash(table.size() * 2);
            return (int)sites.size() - 1;
        }
        if (sites[s].pc == pc && sites[s].kind == kind) return s;
    }
}
void Sites::rehash(size_t size) {
    table.assign(size, -1);
    mask = size - 1;
    for (size_t s = 0; s < sites.size(); s++) {
        size_t i = hash(sites[s].pc, sites[s].kind) & mask;
        while (table[i] >= 0) i = (i + 1) & mask;
        table[i] = (int)s;
    }
}

// ---- shared memory: banks -----------------------------------------------------------------------
// 4 bytes a lane or fewer are served in one go; of 8 bytes half a warp, of 16 bytes a quarter. Twice as many of a load
// whose lanes come in pairs (l and l ^ 1 throughout, or l and l ^ 2) that want the same address, or of which only one
// takes part. Nsight Compute's counts on an H200 say so (tests/simt/data/bank_probe_h200.json); no manual does.
static int lanes_at_once(const uint64_t* address, uint32_t mask, int bytes, bool load) {
    if (bytes < 8) return WARP;
    auto in_pairs = [&](int distance) {
        for (int l = 0; l < WARP; l++)
            if ((mask >> l & mask >> (l ^ distance) & 1) && address[l] != address[l ^ distance]) return false;
        return true;
    };
    return (bytes >= 16 ? 8 : 16) * (load && (in_pairs(1) || in_pairs(2)) ? 2 : 1);
}

Wavefronts shared_wavefronts(const uint64_t* address, uint32_t mask, int bytes, bool load) {
    const int step = lanes_at_once(address, mask, bytes, load);
    Wavefronts total{0, 0};
    for (int first = 0; first < WARP; first += step) {
        uint64_t words[32][WARP * 2];  // words[b]: the different words wanted of bank b
        uint8_t wanted[32] = {};
        int worst = 0;
        for (int l = first; l < first + step; l++) {
            if (!(mask >> l & 1)) continue;
            for (uint64_t word = address[l] / 4; word <= (address[l] + bytes - 1) / 4; word++) {
                int bank = word % 32, i = 0;
                while (i < wanted[bank] && words[bank][i] != word) i++;
                if (i < wanted[bank]) continue;  // a broadcast: the word comes for free
                words[bank][wanted[bank]++] = word;
                worst = std::max(worst, (int)wanted[bank]);
            }
        }
        total.needed += worst;
        total.ideal += worst > 0;
    }
    return total;
}

// ---- global memory: sectors ---------------------------------------------------------------------
static int unique(uint64_t* values, int n) {
    std::sort(values, values + n);
    return (int)(std::unique(values, values + n) - values);
}
static void count_sectors(Site& site, const Request& r) {
    uint64_t sectors[WARP * 2], words[WARP * 4];
    int n = 0, w = 0, lanes = 0;
    const bool by_line = site.kind == CP_ASYNC && r.bytes == 16;
    for (int l = 0; l < WARP; l++) {
        if (!(r.mask >> l & 1) || r.address[l] == NO_ADDRESS) continue;
        lanes++;
        const uint64_t a = r.address[l] & ((1ull << 48) - 1), line = by_line ? r.address[l] >> 48 << 48 : 0;
        for (uint64_t s = a / 32; s <= (a + r.bytes - 1) / 32; s++)
            if (!n || sectors[n - 1] != (s | line)) sectors[n++] = s | line;
        for (uint64_t v = a / 4; v <= (a + r.bytes - 1) / 4 && w < WARP * 4; v++)
            if (!w || words[w - 1] != v) words[w++] = v;
    }
    site.count[1] += unique(sectors, n);
    site.count[2] += (unique(words, w) * 4 + 31) / 32;  // the same words, gathered: the fewest sectors they fit in
    site.count[3] += (uint64_t)lanes * r.bytes;
}

static void count_request(Site& site, const Request& r) {
    site.count[0]++;
    switch (site.kind) {
    case SHARED_LOAD:
    case SHARED_STORE: {
        const Wavefronts w = shared_wavefronts(r.address, r.mask, r.bytes, site.kind == SHARED_LOAD);
        site.count[1] += w.needed;
        site.count[2] += w.ideal;
    }
        site.count[3] += (uint64_t)__builtin_popcount(r.mask) * r.bytes;
        break;
    case GLOBAL_LOAD:
    case GLOBAL_STORE:
    case CP_ASYNC: count_sectors(site, r); break;
    case CLUSTER_LOAD:
    case CLUSTER_STORE: site.count[1] += (uint64_t)__builtin_popcount(r.mask) * r.bytes; break;
    default: break;
    }
}

uint32_t executions(const Lane* lane, int site) {
    const auto& logs = lane->warp->logs;
    return (size_t)site < logs.size() ? logs[site].executions[lane->lane] : 0;
}

// ---- requests -----------------------------------------------------------------------------------
constexpr uint32_t MOST_OPEN = 1 << 16;  // requests of one instruction that lanes of the warp are still to join
void count_access(Lane* lane, int site, uint64_t address, int bytes) {
    Warp* warp = lane->warp;
    if ((size_t)site >= warp->logs.size()) warp->logs.resize(site + 16);
    SiteLog& log = warp->logs[site];
    if (!log.dirty) log.dirty = true, warp->dirty.push_back(site);
    const uint32_t number = log.executions[lane->lane]++;
    if (number < log.first) return;  // far behind a lane that spins
    const uint32_t i = number - log.first;
    if (i >= log.requests.size()) log.requests.resize(i + 1);
    Request& r = log.requests[i];
    r.mask |= 1u << lane->lane;
    r.bytes = bytes;
    r.address[lane->lane] = address;
    const bool ahead = i - log.counted >= MOST_OPEN;  // it spins, and the others do not come here: it is not waited for
    if (i != log.counted && !ahead) return;
    Site& s = (*lane->block->worker->sites)[site];
    for (uint32_t n = ahead ? MOST_OPEN / 2 : 0; n; n--) count_request(s, log.requests[log.counted++]);
    while (log.counted < log.requests.size() && !(warp->alive & ~log.requests[log.counted].mask))
        count_request(s, log.requests[log.counted++]);
    if (log.counted > 256) {  // forget the counted ones
        log.requests.erase(log.requests.begin(), log.requests.begin() + log.counted);
        log.first += log.counted;
        log.counted = 0;
    }
}
void count_incomplete(Warp* warp) {
    for (int site : warp->dirty) {
        SiteLog& log = warp->logs[site];
        Site& s = (*warp->block->worker->sites)[site];
        for (size_t i = log.counted; i < log.requests.size(); i++)
            if (log.requests[i].mask) count_request(s, log.requests[i]);
        log.requests.clear();
        memset(log.executions, 0, sizeof log.executions);
        log.first = log.counted = 0;
        log.dirty = false;
    }
    warp->dirty.clear();
}

}  // namespace simt
