// Races, uninitialised bytes and bounds in shared memory: see shadow.h.
#include "shadow.h"
#include "findings.h"
#include "values.h"
#include "warpgroup.h"
#include <sys/mman.h>
#include <algorithm>

namespace simt {

std::vector<StaticArray> static_arrays;

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
SharedShadow::~SharedShadow() { munmap(cells, count * sizeof(Cell)); }

void SharedShadow::begin_block(size_t dynamic_bytes) {
    memset((void*)cells, 0,
           (dynamic / 2 + dynamic_bytes / 2 + 1) * sizeof(Cell));  // the dynamic part is the last
    dynamic_end = dynamic + dynamic_bytes;
}

// Did what the stamp stands for happen before what `lane` does now?
static inline bool ordered(const Stamp& s, const Lane* lane) {
    return s.time == 0 || s.thread == (uint64_t)lane->id || s.time <= lane->warp->known[s.thread / WARP];
}

static const char* verb(Sites& sites, const Stamp& s, bool write) {
    switch (sites[s.site].kind) {
    case CP_ASYNC: return "cp.async";
    case LDMATRIX: return "ldmatrix";
    case STMATRIX: return "stmatrix";
    case SHARED_ATOMIC: return "atomic";
    default: return write ? "store" : "load";
    }
}

void SharedShadow::file_out_of_bounds(Lane* lane, uint64_t address, int bytes, const char* how) {
    Finding f{"shared-out-of-bounds", how};
    f.value[0] = (int64_t)(address - dynamic), f.value[1] = bytes,
    f.value[2] = (int64_t)(dynamic_end - dynamic);
    file(lane, f);
}

void SharedShadow::land(Lane* lane, uint64_t address, int bytes, int site) {
    Stamp now{};
    now.time = lane->warp->time, now.thread = lane->id, now.site = site;
    for (uint64_t c = address / 2; c < (address + bytes) / 2; c++) {  // copies are of 4 bytes or more, and aligned
        now.bytes = 3;
        cells[c].write = now;
        cells[c].copying = 0;
        cells[c].full = 3;
    }
}

bool SharedShadow::touch(Lane* lane, uint64_t address, int bytes, Access access, int site, const char* how,
                         Conflict* conflict) {
    Sites& sites = *lane->block->worker->sites;
    const bool writes = access != READ, reads = access == READ || access == ATOMIC;
    const bool of_wgmma = writes && watched && lane->block->worker->warpgroups->file_if_read(lane, address, bytes, how);
    bool filed = of_wgmma, pending = false;  // one finding an access: the next bytes say the same
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
        c.same_instruction = c.same_warp && other.site == now.site && other.time == now.time &&
                             other.execution == now.execution;
        if (conflict && !strcmp(other_how, "store")) *conflict = c, pending = true;  // perhaps of the same value
        else file_conflict(lane, c, lane->pc, false), filed = true;
    };
    // Of the readers since the last write keep two. A later write conflicts with some reader exactly when it
    // conflicts with one of these: readers of two different warps catch a writer of any warp, and two different
    // lanes catch a writer of their own warp. A newer read of a warp stands for its older ones.
    auto read = [&](Cell& cell) {
        Stamp &first = cell.read[0], &second = cell.read[1];
        const uint64_t warp = now.thread / WARP;
        if (first.thread == now.thread && first.time == now.time) now.bytes |= first.bytes;
        if (first.time == 0 || first.thread == now.thread || ordered(first, lane)) {
            if (second.time && second.thread == now.thread) second.time = 0;
            first = now;
        } else if (second.time == 0 || second.thread == now.thread || ordered(second, lane) ||
                   (first.thread / WARP == second.thread / WARP && first.thread / WARP != warp)) {
            second = now;
        }
    };
    auto write = [&](Cell& cell, uint8_t mine) {
        // Where nothing was yet, not the copy is too early but the reader.
        const char* kind = access != COPY_ISSUED ? "race" : cell.full & mine ? "stage-overwritten" : "read-before-wait";
        for (const Stamp& r : cell.read)
            if ((r.bytes & mine) && !ordered(r, lane)) file(kind, r, verb(sites, r, false));
        // A thread's own store just before its atomic is what the other threads' atomics conflict with.
        const Stamp& w = cell.write;
        if (!now.atomic || w.atomic || w.thread != now.thread || w.time != now.time || (w.bytes & mine) != mine)
            cell.write = now;
        if (mine == 3) cell.read[0].time = cell.read[1].time = 0;
        cell.copying = access == COPY_ISSUED ? (uint16_t)(lane->id + 1) : 0;
        if (access != COPY_ISSUED) cell.full |= mine;
    };
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
        if (cell.copying) file(writes ? "stage-overwritten" : "read-before-wait", cell.write, "cp.async");
        else if ((cell.write.bytes & mine) && !(now.atomic && cell.write.atomic) && !ordered(cell.write, lane))
            file("race", cell.write, verb(sites, cell.write, true));
        if (reads && (cell.full & mine) != mine && !filed && !cell.copying) {
            Finding f{"uninitialised-shared", how};
            f.value[0] = (int64_t)address, f.value[1] = bytes;
            simt::file(lane, f);
            filed = true;
        }
        if (writes) write(cell, mine);
        else read(cell);
        after = cell;
    }
    return pending;
}

void SharedShadow::check_pieces(Warp* warp, const std::vector<uint32_t>& pieces, const char* how, uintptr_t pc) {
    Lane* lane = warp->lanes;
    Sites& sites = *lane->block->worker->sites;
    auto known = [&](const Stamp& s) {  // a lane's own store comes before the warp's wgmma
        return s.time == 0 || (int)s.thread / WARP == warp->index || s.time <= warp->known[s.thread / WARP];
    };
    const Cell* before = nullptr;  // the last one that was looked at
    for (uint32_t piece : pieces) {
        if (piece == ~0u) continue;
        for (uint32_t c = piece / 2; c < piece / 2 + 8; c++) {
            const Cell& cell = cells[c];
            if (before && !memcmp(&cell, before, sizeof cell)) continue;
            before = &cell;
            Finding f{"", how};
            f.pc = pc;
            f.value[0] = piece, f.value[1] = 16;
            if (cell.copying) f.kind = "read-before-wait", f.text = "cp.async";
            else if (cell.full != 3) f.kind = "uninitialised-shared";
            else if (!known(cell.write)) f.kind = "race", f.text = verb(sites, cell.write, true);
            else continue;
            if (!f.text.empty()) f.other_pc = sites[cell.write.site].pc, f.other_thread = (int)cell.write.thread;
            simt::file(lane, f);
            return;
        }
    }
}

}  // namespace simt
