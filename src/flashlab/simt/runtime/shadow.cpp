// Races, uninitialised bytes and bounds in shared memory: see shadow.h.
#include "shadow.h"
#include "clocks.h"
#include "proxy.h"
#include "values.h"
#include "warpgroup.h"
#include <sys/mman.h>

namespace simt {

std::vector<StaticArray> static_arrays;
size_t dynamic_shift;

SharedShadow::SharedShadow(const SharedWindow& w, uint64_t kernel) : window(w) {
    count = (w.high - w.base) / 2 + 1;
    cells = (Cell*)mmap(nullptr, count * sizeof(Cell), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    dynamic = w.dynamic - w.base;
    dynamic_end = dynamic;
    owner.assign(dynamic / 2 + 1, 0);
    for (size_t i = 0; i < static_arrays.size(); i++) {
        if (kernel && static_arrays[i].kernel && static_arrays[i].kernel != kernel) continue;
        uint64_t low = w.low - w.base + static_arrays[i].offset;
        for (uint64_t c = low / 2; c < (low + static_arrays[i].bytes + 1) / 2 && c < owner.size(); c++)
            owner[c] = (uint16_t)(i + 1);
    }
}
SharedShadow::~SharedShadow() {
    for (AsyncRead* r : async_reads) delete r;
    munmap(cells, count * sizeof(Cell));
}

void SharedShadow::begin_block(size_t dynamic_bytes) {
    memset((void*)cells, 0,
           (dynamic / 2 + dynamic_bytes / 2 + 1) * sizeof(Cell));  // the dynamic part is the last
    dynamic_end = dynamic + dynamic_bytes;
    for (AsyncRead* r : async_reads) delete r;
    async_reads.clear();
    being_read.clear();
    remote.clear();
    late.clear();
    reading = false;
}

// Did what the stamp stands for happen before what `lane` does now?
static inline bool ordered(const Stamp& s, const Lane* lane) { return s.time == 0 || before(s.thread, s.time, lane); }
static inline bool write_ordered(const Cell& cell, const Lane* lane) {
    if (cell.async) return cell.write.time <= lane->warp->known[cell.fences];
    return ordered(cell.write, lane);
}

const char* verb(const Sites& sites, const Stamp& s, bool write) {
    switch (sites.all()[s.site].kind) {
    case CP_ASYNC: return "cp.async";
    case LDMATRIX: return "ldmatrix";
    case STMATRIX: return "stmatrix";
    case TMA_LOAD: return "tma_load";
    case BULK_LOAD: return "bulk_load";
    case TMA_STORE: return "tma_store";
    case TMA_REDUCE: return "tma_reduce_add";
    case BULK_STORE: return "bulk_store";
    case SHARED_ATOMIC: return "atomic";
    default: return write ? "store" : "load";
    }
}

void SharedShadow::file_out_of_bounds(Lane* lane, uint64_t address, int bytes, const char* how) {
    file(lane,
         {"shared-out-of-bounds", how, "", {(int64_t)(address - dynamic), bytes, (int64_t)(dynamic_end - dynamic)}});
}

void SharedShadow::land(Lane* lane, uint64_t address, int bytes, int site) {
    Stamp now{};
    now.time = lane->warp->time, now.thread = lane->id, now.site = site;
    for (uint64_t c = address / 2; c < (address + bytes) / 2; c++) {  // copies are of 4 bytes or more, and aligned
        now.bytes = 3;
        cells[c].write = now;
        cells[c].copying = 0;
        cells[c].full = 3;
        cells[c].async = 0;
        cells[c].fences = fences_of(lane, SHARED);
    }
}
void SharedShadow::land_bulk(uint64_t address, int bytes, int clock, uint32_t time) {
    for (uint64_t c = address / 2; c < (address + bytes) / 2; c++) {
        cells[c].write.time = time;  // the rest of the stamp is that of the issue
        cells[c].fences = (uint16_t)clock;
        cells[c].copying = 0;
        cells[c].full = 3;
    }
}

static inline void note_read(Cell& cell, Stamp& now, const Lane* lane) {
    const Stamp& first = cell.read[0];
    if (first.thread == now.thread && first.time == now.time) now.bytes |= first.bytes;
    keep_two(cell.read, now, [lane](const Stamp& s) { return ordered(s, lane); });
}

// ---- the async proxy's reads --------------------------------------------------------------------
AsyncRead* SharedShadow::begin_read(Lane* lane, AsyncRead read) {
    if (being_read.empty()) being_read.assign(count / 8 + 1, 0);
    for (auto& r : read.ranges) {
        touch(lane, r.first, (int)r.second, PROXY_READ, read.site, read.how, nullptr);
        for (uint32_t chunk = r.first / 16; chunk < (r.first + r.second) / 16; chunk++) being_read[chunk]++;
    }
    reading = true;
    async_reads.push_back(new AsyncRead(std::move(read)));
    return async_reads.back();
}
void SharedShadow::end_read(AsyncRead* read, const Lane* by) {
    for (auto& r : read->ranges) {
        for (uint32_t chunk = r.first / 16; chunk < (r.first + r.second) / 16; chunk++) being_read[chunk]--;
        if (!by) continue;
        for (uint64_t c = r.first / 2; c < (r.first + r.second) / 2; c++) {
            Stamp now{};
            now.time = by->warp->time, now.thread = by->id, now.site = read->site, now.bytes = 3;
            note_read(cells[c], now, by);
        }
    }
    async_reads.erase(std::find(async_reads.begin(), async_reads.end(), read));
    reading = !async_reads.empty();
    delete read;
}
const char* SharedShadow::overwrites(uint32_t address, const char* how) const {
    if (cells[address / 2].full) return "stage-overwritten";
    return strcmp(how, "tma_load") && strcmp(how, "bulk_load") && strcmp(how, "cp.async") ? "race" : "read-before-wait";
}
bool SharedShadow::file_if_read(Lane* lane, uint64_t address, int bytes, const char* how) {
    if (watched && lane->block->worker->warpgroups->file_if_read(lane, address, bytes, how)) return true;
    const uint64_t end = (address + bytes - 1) / 16;
    uint64_t chunk = address / 16;
    while (reading && chunk <= end && !being_read[chunk]) chunk++;
    if (!reading || chunk > end) return false;
    for (const AsyncRead* read : async_reads)
        for (auto& r : read->ranges)
            if (chunk * 16 >= r.first && chunk * 16 < r.first + r.second) {
                file(lane, {overwrites((uint32_t)chunk * 16, how),
                            how,
                            read->how,
                            {(int64_t)address, bytes},
                            0,
                            (*lane->block->worker->sites)[read->site].pc,
                            read->thread});
                return true;
            }
    return false;
}

void SharedShadow::still_loading(const Warp* warp) {
    for (const Loading& l : warp->loading) {
        Stamp& s = late[l.address / 16];
        s.time = warp->time, s.thread = l.thread, s.site = l.site;
    }
}
bool SharedShadow::file_if_loading(Lane* lane, uint64_t address, int bytes, const char* how) {
    bool filed = false;
    for (uint64_t chunk = address / 16; chunk < (address + bytes + 15) / 16; chunk++) {
        const auto it = late.find((uint32_t)chunk);
        if (it == late.end()) continue;
        const Stamp s = it->second;
        late.erase(it);
        if (filed || ordered(s, lane)) continue;
        file(lane, {"stage-overwritten", how, "ldmatrix, not waited for", {(int64_t)address, bytes}, 0,
                    (*lane->block->worker->sites)[s.site].pc, (int)s.thread});
        filed = true;
    }
    return filed;
}

// ---- mbarriers ----------------------------------------------------------------------------------
void SharedShadow::make_mbarrier(Lane* lane, uint32_t address, int site) {
    touch(lane, address, 8, WRITE, site, "mbarrier_init", nullptr);
    for (uint32_t c = address / 2; c < address / 2 + 4; c++) cells[c].copying = MBARRIER;
}
void SharedShadow::end_mbarrier(uint32_t address) {
    for (uint32_t c = address / 2; c < address / 2 + 4; c++) cells[c].copying = 0, cells[c].full = 0;
}

bool SharedShadow::touch(Lane* lane, uint64_t address, int bytes, Access access, int site, const char* how,
                         Conflict* conflict) {
    Sites& sites = *lane->block->worker->sites;
    const bool writes = access != READ && access != PROXY_READ, reads = !writes || access == ATOMIC;
    const bool copies = access == COPY_ISSUED || access == BULK_ISSUED;
    const bool async = access == BULK_ISSUED || access == PROXY_READ;
    bool filed = false, pending = false;  // one finding an access: the next bytes say the same
    Stamp now{};
    now.time = lane->warp->time, now.thread = lane->id, now.site = site, now.atomic = is_atomic(access);
    now.execution = executions(lane, site);

    auto file = [&](const char* kind, const Stamp& other, const char* other_how) {
        if (filed || pending) return;
        Conflict c{};
        c.kind = kind, c.how = how, c.other_how = other_how;
        c.other_pc = sites[other.site].pc, c.other_thread = (int)other.thread, c.other_block = -1;
        c.value[0] = (int64_t)address, c.value[1] = bytes;
        c.same_warp = other.thread / WARP == now.thread / WARP;
        c.same_instruction =
            c.same_warp && other.site == now.site && other.time == now.time && other.execution == now.execution;
        if (conflict && !strcmp(other_how, "store")) *conflict = c, pending = true;  // perhaps of the same value
        else file_conflict(lane, c, lane->pc, false), filed = true;
    };
    auto write = [&](Cell& cell, uint8_t mine) {
        // Where nothing was yet, not the copy is too early but the reader.
        const char* kind = !copies ? "race" : cell.full & mine ? "stage-overwritten" : "read-before-wait";
        for (const Stamp& r : cell.read)
            if ((r.bytes & mine) && !ordered(r, lane)) file(kind, r, verb(sites, r, false));
        // A thread's own store just before its atomic is what the other threads' atomics conflict with.
        const Stamp& w = cell.write;
        if (!now.atomic || w.atomic || w.thread != now.thread || w.time != now.time || (w.bytes & mine) != mine)
            cell.write = now;
        if (mine == 3) cell.read[0].time = cell.read[1].time = 0;
        cell.copying = copies ? (uint16_t)(lane->id + 1) : 0;
        cell.async = async;
        cell.fences = fences_of(lane, SHARED);
        if (!copies) cell.full |= mine;
    };
    if (writes && __builtin_expect(watched | reading, 0)) filed = file_if_read(lane, address, bytes, how);
    if (access == BULK_ISSUED && !late.empty()) filed |= file_if_loading(lane, address, bytes, how);
    if (__builtin_expect(!remote.empty(), 0))
        filed |= meets_remote(lane, lane->block, address, bytes, writes, how, lane->pc);
    Cell before, after;  // the cell to the left
    uint8_t whole = 0;   // it was touched as a whole
    for (uint64_t c = address / 2; c <= (address + bytes - 1) / 2; c++) {
        Cell& cell = cells[c];
        uint8_t mine = 3;  // which of the cell's two bytes
        if (c * 2 < address) mine &= 2;
        if (c * 2 + 1 >= address + bytes) mine &= 1;
        if (whole == 3 && mine == 3 && !memcmp(&cell, &before, sizeof cell)) {  // as most often
            cell = after;
            continue;
        }
        before = cell;
        now.bytes = whole = mine;
        const char* while_copied = writes ? "stage-overwritten" : "read-before-wait";
        if (cell.copying == MBARRIER) file("mbarrier-touched", cell.write, "mbarrier_init");
        else if (cell.copying) file(while_copied, cell.write, verb(sites, cell.write, true));
        else if ((cell.write.bytes & mine) && !(now.atomic && cell.write.atomic) && !write_ordered(cell, lane))
            file(cell.async ? while_copied : "race", cell.write, verb(sites, cell.write, true));
        else if (async && !cell.async && cell.write.time &&
                 !visible_to_async(lane, SHARED, cell.write.thread, cell.write.time, cell.fences))
            file("proxy-fence", cell.write, verb(sites, cell.write, true));
        if (reads && (cell.full & mine) != mine && !filed && !cell.copying) {
            simt::file(lane, {"uninitialised-shared", how, "", {(int64_t)address, bytes}});
            filed = true;
        }
        if (writes) write(cell, mine);
        else if (access == READ) note_read(cell, now, lane);
        after = cell;
    }
    return pending;
}

void SharedShadow::check_pieces(Warp* warp, const std::vector<uint32_t>& pieces, const char* how, uintptr_t pc) {
    Block* block = warp->block;
    Sites& sites = *block->worker->sites;
    const Cell* last = nullptr;  // that was looked at
    for (uint32_t piece : pieces) {
        if (piece == ~0u) continue;  // out of bounds
        if (!remote.empty() && meets_remote(warp->lanes, block, piece, 16, false, how, pc)) return;
        for (uint32_t c = piece / 2; c < piece / 2 + 8; c++) {
            const Cell& cell = cells[c];
            if (last && !memcmp(&cell, last, sizeof cell)) continue;
            last = &cell;
            // A lane's own store comes before what its warp does.
            const Stamp& w = cell.write;
            const bool own = !cell.async && (int)w.thread / WARP == warp->index;
            const Lane* lane = own ? &block->lane[w.thread] : warp->lanes;
            const char* kind = cell.copying == MBARRIER     ? "mbarrier-touched"
                               : cell.copying               ? "read-before-wait"
                               : cell.full != 3             ? "uninitialised-shared"
                               : !write_ordered(cell, lane) ? cell.async ? "read-before-wait" : "race"
                               : !cell.async && w.time && !visible_to_async(lane, SHARED, w.thread, w.time, cell.fences)
                                   ? "proxy-fence"
                                   : nullptr;
            if (!kind) continue;
            Finding f{kind, how};
            f.pc = pc;
            f.value[0] = piece, f.value[1] = 16;
            if (strcmp(kind, "uninitialised-shared")) {
                f.other_pc = sites[w.site].pc, f.other_thread = (int)w.thread;
                f.text = cell.copying == MBARRIER ? "mbarrier_init" : verb(sites, w, true);
            }
            simt::file(warp->lanes, f);
            return;
        }
    }
}

}  // namespace simt
