// Races and unwritten bytes of global memory: see global_shadow.h.
#include "global_shadow.h"
#include "bulk_store.h"
#include "faults.h"
#include "proxy.h"
#include "values.h"
#include <sched.h>
#include <sys/mman.h>

namespace simt {

GlobalShadow global_shadow;

// `write` and `read` are of the block that came here last; `low_...` and `high_...` are accesses of the blocks
// with the lowest and the highest number, of all that have come. Two blocks are enough: who conflicts with any
// conflicts with one of them. And as they are kept by number, the findings do not depend on who was faster.
struct GlobalShadow::Cell {
    uint32_t launch;
    uint8_t full;  // a bit a byte; and in the upper half, which were stored with different values (changed)
    GlobalStamp write, read[2];
    GlobalStamp low_write, high_write, low_read, high_read;
};

// Blocks come from several OS threads.
static std::atomic_flag locks[4096];
struct CellLock {
    std::atomic_flag& flag;
    explicit CellLock(uintptr_t address) : flag(locks[address / 16 % 4096]) {
        while (flag.test_and_set(std::memory_order_acquire)) {}
    }
    ~CellLock() { flag.clear(std::memory_order_release); }
};

void GlobalShadow::add(uintptr_t low, uintptr_t high, int argument, int item, bool empty) {
    const int grain = item >= 4 ? 4 : 2;
    for (Region& r : regions)
        if (low < r.high && high > r.low) {  // the same bytes as another argument's
            if (low >= r.low && high <= r.high) {
                r.empty &= empty;
                return;
            }
        }
    const size_t count = (high - low) / grain + 2;
    void* cells = mmap(nullptr, count * sizeof(Cell), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (cells != MAP_FAILED) regions.push_back({low, high, argument, grain, empty, (Cell*)cells, count});
}
void GlobalShadow::clear() {
    for (Region& r : regions) munmap((void*)r.cells, r.count * sizeof(Cell));
    regions.clear();
}
void GlobalShadow::begin_launch() {
    launch++;
    forget_order();
}
void GlobalShadow::written(uintptr_t address, size_t bytes) {
    for (Region& r : regions) {
        if (!r.empty) continue;
        for (uintptr_t a = std::max(address, r.low); a < std::min(address + bytes, r.high); a++)
            r.cells[a / r.grain - r.low / r.grain].full |= 1 << a % r.grain;
    }
}

// ---- what is stored ------------------------------------------------------------------------------
static std::atomic_flag stores[4096];

void GlobalShadow::hold(Lane* lane, uintptr_t address, int bytes) {
    Worker* worker = lane->block->worker;
    const int a = (int)(address / 16 % 4096), b = (int)((address + (uintptr_t)bytes - 1) / 16 % 4096);
    for (int i = 0; i < (a == b ? 1 : 2); i++) {
        const int wanted = i == 0 ? std::min(a, b) : std::max(a, b);
        while (stores[wanted].test_and_set(std::memory_order_acquire)) {
            if (cancelled() || lane->block->launch->stop < lane->block->number) return;  // nobody asks any more
            sched_yield();
        }
        worker->held[i] = wanted;
    }
}
void GlobalShadow::let_go(Worker* worker) {
    for (int& held : worker->held) {
        if (held >= 0) stores[held].clear(std::memory_order_release);
        held = -1;
    }
}
GlobalShadow::Region* GlobalShadow::region_of(uintptr_t address, int bytes) {
    for (Region& r : regions)
        if (address >= r.low && address + (uintptr_t)bytes <= r.high) return &r;
    return nullptr;
}
bool GlobalShadow::changed(uintptr_t address, int bytes, const uint8_t* before) {
    const Region* r = region_of(address, bytes);
    bool differ = false;
    for (int i = 0; r && i < bytes; i++) {
        const uintptr_t at = address + (uintptr_t)i, grain = (uintptr_t)r->grain;
        Cell& cell = r->cells[at / grain - r->low / grain];
        const uint8_t bit = (uint8_t)(0x10 << at % grain);
        CellLock lock(at / grain * grain);
        if (*(const uint8_t*)at != before[i]) cell.full |= bit;
        differ |= (cell.full & bit) != 0;
    }
    return differ;
}

void GlobalShadow::name_word(uintptr_t address, Finding& f) {
    for (const Buffer& b : buffers)
        if (address >= b.low && address < b.high)
            f.text = "argument", f.value[0] = b.number, f.value[2] = (int64_t)(address - b.low);
    const Region* r = region_of(address, 1);
    if (!r) return;
    if (r->argument < 0) f.text = "variable", f.value[0] = -1, f.value[2] = (int64_t)(address - r->origin());
    const Cell& cell = r->cells[address / (uintptr_t)r->grain - r->low / (uintptr_t)r->grain];
    CellLock lock(address);
    if (cell.launch != launch || !cell.write.pc) {
        f.text += " never";
        return;
    }
    f.other_pc = cell.write.pc + module_base, f.other_thread = (int)cell.write.thread;
    f.other_block = (int64_t)cell.write.block;
    f.how = cell.write.atomic && !cell.write.loose ? "atomic" : "store";
}

bool GlobalShadow::in_flight(Lane* lane, uintptr_t address, int bytes, bool writes, bool add, const char* how) {
    const uintptr_t end = address + (uintptr_t)bytes;
    for (const BulkStore* store : lane->block->writing) {
        if (address >= store->high || end <= store->low || (add && store->add)) continue;
        bool hit = false;
        for_each_global(store->copy, [&](uintptr_t to, int n, int) {
            hit |= address < to + (uintptr_t)n && end > to;
        });
        const Region* region = region_of(address, bytes);
        if (!hit || !region) continue;
        file(lane, {writes ? "global-race" : "read-before-wait", how, std::string("in flight ") + store->copy.how,
                    {region->argument, bytes, (int64_t)(address - region->origin())}, 0,
                    (*lane->block->worker->sites)[store->copy.site].pc, store->copy.thread});
        return true;
    }
    return false;
}

// ---- who comes after whom --------------------------------------------------------------------------
static bool same_block_ordered(const GlobalStamp& s, const Lane* lane) {
    return !s.pc || s.thread == (uint32_t)lane->id || s.time <= lane->warp->known[s.thread / WARP];
}

bool GlobalShadow::touch(Lane* lane, uintptr_t address, int bytes, Access access, uint32_t execution,
                         const char* how, Conflict& conflict, bool* watched, bool async) {
    const Region* region = region_of(address, bytes);
    if (!region) return false;
    const uint32_t block = (uint32_t)lane->block->number;
    const bool writes = access != READ, reads = access == READ || access == ATOMIC;
    const bool copies = async && writes;  // it was looked at when it was issued
    if (!lane->block->writing.empty() && !copies && in_flight(lane, address, bytes, writes, false, how)) return false;
    bool filed = false, pending = false;  // one finding an access: the next bytes say the same
    GlobalStamp now;
    now.block = block, now.pc = (uint32_t)(lane->pc - module_base);
    now.time = lane->warp->time, now.thread = (uint32_t)lane->id;
    now.atomic = is_atomic(access), now.execution = (uint8_t)execution;
    now.async = async, now.update = access == VOLATILE_UPDATE, now.loose = now.update || access == VOLATILE_STORE;
    now.fences = (uint8_t)fences_of(lane, GLOBAL);
    now.published = lane->block->published;

    auto conflicts = [&](const GlobalStamp& s, bool wrote) {
        Conflict c{};
        c.kind = known(lane, s, LOOKED) ? "acquire-missing" : "global-race";
        c.how = how;
        c.other_how = s.loose ? "store" : s.atomic ? "atomic" : wrote ? "store" : "load";
        if ((s.update || now.update) && s.atomic && now.atomic)
            c.how = now.loose ? "volatile" : how, c.other_how = s.loose ? "volatile" : "atomic";
        c.other_pc = s.pc + module_base, c.other_thread = (int)s.thread;
        c.other_block = s.block == block ? -1 : (int64_t)s.block;
        c.value[0] = region->argument, c.value[1] = bytes, c.value[2] = (int64_t)(address - region->origin());
        c.same_warp = s.block == block && s.thread / WARP == now.thread / WARP;
        c.same_instruction =
            c.same_warp && s.pc == now.pc && s.time == now.time && s.execution == now.execution;
        if (access == WRITE && wrote && !s.atomic) {  // perhaps of the same value
            if (!pending) conflict = c, pending = true;
        } else if (!filed) {
            file_conflict(lane, c, lane->pc, false);
            filed = true;
        }
    };
    const uintptr_t grain = (uintptr_t)region->grain, end = address + (uintptr_t)bytes;
    for (uintptr_t at = address / grain * grain; at < end; at += grain) {
        Cell& cell = region->cells[at / grain - region->low / grain];
        CellLock lock(at);
        if (cell.launch != launch) {
            const uint8_t full = cell.full & 0xf;
            cell = Cell();
            cell.launch = launch, cell.full = full;
        }
        uint8_t mine = (uint8_t)((1 << grain) - 1);  // which of the cell's bytes
        if (at < address) mine &= (uint8_t)(~0u << (address - at));
        if (at + grain > end) mine &= (uint8_t)((1 << (end - at)) - 1);
        now.bytes = mine;
        // A volatile store is one by itself, as an atomic is; an update is not: what another does between its halves would
        // be lost. What its own load has seen says nothing of that.
        auto meets = [&](const GlobalStamp& s) {
            if (!s.pc || !(s.bytes & mine)) return false;
            if (!(s.atomic && now.atomic)) return true;
            return (s.update || now.update) &&
                   !published_by(s, address, now.update ? lane->volatile_known : known_of_word(lane, address));
        };
        auto unseen = [&](const GlobalStamp& s, bool visible) {  // a copy, and a write that it comes after
            if (!async || s.async || !(s.bytes & mine) || visible || filed) return;
            Finding f{"proxy-fence", how};
            f.other_pc = s.pc + module_base, f.other_thread = (int)s.thread;
            f.other_block = s.block == block ? -1 : (int64_t)s.block;
            if (s.block != block) f.thread = lane->id, f.block = block;
            f.text = s.loose || !s.atomic ? "global store" : "global atomic";
            f.value[0] = region->argument, f.value[1] = bytes, f.value[2] = (int64_t)(address - region->origin());
            f.pc = lane->pc;
            file(lane, f);
            filed = true;
        };

        // Other blocks.
        for (GlobalStamp* s : {&cell.low_write, &cell.high_write, &cell.low_read, &cell.high_read}) {
            const bool wrote = s == &cell.low_write || s == &cell.high_write;
            if (!s->pc || s->block == block || (!wrote && !writes)) continue;
            // A copy needs a fence of its proxy, which stands for the acquire; a store does not come before the look
            // that it depends on, and so after what was read before; and one word's atomics come one after the other.
            const Knowledge needed = async ? BY_BLOCK : wrote ? ACQUIRED : LOOKED;
            if (known(lane, *s, needed) ||
                (s->atomic && !now.update && published_by(*s, address, known_of_word(lane, address)))) {
                if (wrote) unseen(*s, known(lane, *s, needed, true));
                if (writes) *s = GlobalStamp();  // who is ordered after this access is ordered after that one
            } else if (meets(*s)) {
                conflicts(*s, wrote);
            }
        }
        // The same block: by its barriers, or by a word, as other blocks are.
        const GlobalStamp& last = cell.write;
        if (last.pc && last.block == block) {
            const Knowledge needed = async ? LOOKED : ACQUIRED;
            if (same_block_ordered(last, lane))
                unseen(last, visible_to_async(lane, GLOBAL, last.thread, last.time, last.fences, 0xff));
            else if (known(lane, last, needed))
                unseen(last, known(lane, last, needed, true));
            else if (meets(last) && !(last.loose && now.loose && known(lane, last, BY_BLOCK))) conflicts(last, true);
        }
        if (access == WRITE) {
            if (!cell.low_write.pc) cell.full &= 0xf;  // it comes after all of the other blocks'
            else if (watched) *watched = true;
        }
        if (writes)
            for (const GlobalStamp& r : cell.read)
                if (r.block == block && meets(r) && !same_block_ordered(r, lane) && !known(lane, r, LOOKED))
                    conflicts(r, false);
        if (reads && region->empty && (cell.full & mine) != mine && !filed) {
            file(lane, {"uninitialised-global", how, "",
                        {region->argument, bytes, (int64_t)(address - region->origin())}});
            filed = true;
        }

        // What is kept.
        GlobalStamp &low = writes ? cell.low_write : cell.low_read, &high = writes ? cell.high_write : cell.high_read;
        for (GlobalStamp* s : {&low, &high}) {
            if (!s->pc || (s == &low ? block < s->block : block > s->block)) *s = now;
            else if (s->atomic && now.atomic) *s = now;  // atomics of one word come one after the other
            else if (s->block == block && s->published != now.published) *s = now;
            else if (s->block == block) s->bytes |= mine;  // of a block its first is kept
        }
        if (writes) {
            const GlobalStamp& w = cell.write;  // as in shadow.cpp
            if (!now.atomic || !w.pc || w.atomic || w.block != block || w.thread != now.thread || w.time != now.time ||
                (w.bytes & mine) != mine)
                cell.write = now;
            if (mine == (1 << grain) - 1) cell.read[0] = cell.read[1] = GlobalStamp();
            cell.full |= mine;
            continue;
        }
        for (GlobalStamp& r : cell.read)
            if (r.block != block) r = GlobalStamp();
        keep_two(cell.read, now, [lane](const GlobalStamp& s) { return same_block_ordered(s, lane); });
    }
    return pending;
}

}  // namespace simt
