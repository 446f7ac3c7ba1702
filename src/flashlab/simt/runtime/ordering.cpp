// Fences and the words that threads meet at: see ordering.h.
#include "ordering.h"
#include "clocks.h"
#include "faults.h"
#include <sched.h>
#include <chrono>
#include <map>

namespace simt {

struct Word {
    struct Published {
        uint32_t block, number;  // the number-th of this word
        uint32_t thread, time, now;   // time: of its fence
        bool fenced;                  // there had been a fence_proxy_async_global in its block
        std::vector<uint32_t> known;  // of the block's warps
        std::vector<std::pair<uint32_t, uint32_t>> fences;  // of other threads: who, and when
        Block::Learnt learnt;         // of other blocks, at other words: who learns of this has learnt this word's

        bool covers(const GlobalStamp& s) const {
            auto by = [&](const auto& fence) { return fence.first == s.thread && s.time <= fence.second; };
            return s.time <= known[s.thread / WARP] || by(std::make_pair(thread, time)) ||
                   std::any_of(fences.begin(), fences.end(), by);
        }
    };
    std::unordered_map<uint32_t, std::vector<Published>> by_block;
    uint32_t count = 0;
    struct Watcher {  // who has published here, or looks again and again: of a block the last
        Lane* lane;
        uint64_t block;
        uint32_t calls, looks;  // its calls at its last look; its looks since the last of `count`
    };
    std::vector<Watcher> watchers;
    Lane* arriving = nullptr;  // its turn has come to publish, and it has not yet
    int updating = 0;          // blocks before such a store
    bool met = false;          // it has been waited for
};

constexpr std::chrono::milliseconds PATIENCE(200);  // of who publishes, with those that watch

static std::mutex mutex;
static std::map<uintptr_t, Word> words;
static std::atomic<bool> any{false};
static uint64_t updating;   // of all words
static bool nobody_comes;   // in this launch

static void learn_of(Block::Learnt& learnt, Word* word, uint32_t count) {
    for (auto& l : learnt)
        if (l.first == word) {
            l.second = std::max(l.second, count);
            return;
        }
    learnt.push_back({word, count});
}
// What a lane knows of these: its own looks, and those that barriers have handed on to it.
static Block::Learnt known_to(const Lane* lane, const std::vector<Block::Look>& looks) {
    Block::Learnt learnt;
    for (auto& l : looks)
        if (before(l.thread, l.time, lane)) learn_of(learnt, l.word, l.count);
    return learnt;
}
static void add_look(std::vector<Block::Look>& looks, const Lane* lane, Word* word, uint32_t count) {
    constexpr size_t MANY = 64;
    const Block* block = lane->block;
    auto covers = [&](const Block::Look& l, Word* of, uint32_t up_to) { return l.word == of && l.count >= up_to; };
    for (auto& l : looks)
        if (covers(l, word, count) && before(l.thread, l.time, lane)) return;
    auto known_to_all = [&](const Block::Look& l) {
        return std::all_of(block->warp, block->warp + block->warps,
                           [&](const Warp& w) { return l.time <= w.known[l.thread / WARP]; });
    };
    if (looks.size() >= MANY) {  // all that every warp knows is one look for each word
        const auto all = looks;
        looks.clear();
        for (size_t i = 0; i < all.size(); i++) {
            bool needed = true;
            for (size_t j = i + 1; j < all.size() && needed; j++)
                needed = !covers(all[j], all[i].word, all[i].count) || !known_to_all(all[j]);
            if (needed) looks.push_back(all[i]);
        }
    }
    looks.push_back({word, count, (uint32_t)lane->id, lane->warp->time});
}

void fence(Lane* lane) {
    Warp* w = lane->warp;
    for (auto& l : known_to(lane, lane->block->looked)) add_look(lane->block->acquired, lane, l.first, l.second);
    lane->earlier_fence = lane->fence;
    lane->fence.time = w->time;
    lane->fence.known.assign(w->known, w->known + lane->block->warps);
    w->time++;  // what the lane does from here on is not covered
}

static void note_look(Word& word, Lane* lane, bool published) {
    if (published)
        for (auto& w : word.watchers) w.looks = 0;
    for (auto& w : word.watchers)
        if (w.lane->block == lane->block) {
            const uint32_t looks = published ? 0 : w.looks + 1;
            w = {lane, lane->block->number, lane->calls, looks};
            return;
        }
    word.watchers.push_back({lane, lane->block->number, lane->calls, 0});
}
// Between two arrivals whoever watches the word looks at it, as may happen on a GPU: else a barrier that opens one
// arrival too early would be found only where the last block is late by itself. (Two looks: the first may have begun
// before. And who waits for something else, or has made many calls since, watches no more.)
static bool all_have_looked(Word& word, const Lane* publisher) {
    constexpr uint32_t MANY = 8;
    auto now = [](const auto& x) { return __atomic_load_n(&x, __ATOMIC_RELAXED); };  // another OS thread's
    auto& all = word.watchers;
    auto gone = [&](const Word::Watcher& w) {
        return now(w.lane->block->number) != w.block || now(w.lane->block->ended) || now(w.lane->state) == DONE;
    };
    all.erase(std::remove_if(all.begin(), all.end(), gone), all.end());
    return std::all_of(all.begin(), all.end(), [&](const Word::Watcher& w) {
        const Block* block = w.lane->block;
        return block == publisher->block || now(w.lane->state) != RUNNABLE || block->holds || w.looks >= 2 ||
               now(w.lane->calls) - w.calls > MANY;
    });
}

// What the lane has learnt at other words; and whether it has news to publish at this one, or merely spins.
static Block::Learnt learnt_elsewhere(const Word& word, const Lane* lane) {
    Block::Learnt elsewhere;
    for (auto& l : known_to(lane, lane->block->acquired))
        if (l.first != &word) elsewhere.push_back(l);
    return elsewhere;
}
static bool has_news(Word& word, const Lane* lane, const Block::Learnt& elsewhere) {
    auto& mine = word.by_block[(uint32_t)lane->block->number];
    if (mine.empty()) return true;
    auto& last = mine.back();
    return last.thread != (uint32_t)lane->id || last.time != lane->fence.time || last.now != lane->warp->time ||
           last.fenced != lane->block->global_fences || last.learnt != elsewhere;
}
void let_others_look(Lane* lane, uintptr_t address) {
    if (!lane->fence.time) return;
    std::unique_lock<std::mutex> lock(mutex);
    Word& word = words[address];
    Block* block = lane->block;
    if (!has_news(word, lane, learnt_elsewhere(word, lane))) return;
    const auto begin = std::chrono::steady_clock::now();
    block->holds = true;
    while ((word.arriving || !all_have_looked(word, lane)) && !cancelled() && block->launch->stop >= block->number &&
           std::chrono::steady_clock::now() - begin < PATIENCE) {
        lock.unlock();
        sched_yield();
        lock.lock();
    }
    block->holds = false;
    word.arriving = lane;
}

void let_another_update(Lane* lane, uintptr_t address) {
    Block* block = lane->block;
    Launch* launch = block->launch;
    std::unique_lock<std::mutex> lock(mutex);
    Word& word = words[address];
    if (word.met) return;
    any = true;
    lock.unlock();
    for (int turn = 0; turn < 2; turn++) let_others_run(lane);  // of its warp, then of its block
    lock.lock();
    auto looked = [&] {
        return std::any_of(word.watchers.begin(), word.watchers.end(),
                           [&](const Word::Watcher& w) { return w.lane->block != block; });
    };
    auto alone = [&] { return launch->next >= launch->blocks && launch->done + updating >= launch->blocks; };
    const auto begin = std::chrono::steady_clock::now();
    block->holds = true, word.updating++, updating++;
    while (!word.met && word.updating < 2 && !looked() && !alone() && !nobody_comes && !cancelled() &&
           launch->stop >= block->number) {
        nobody_comes = std::chrono::steady_clock::now() - begin > 5 * PATIENCE;
        lock.unlock();
        block->worker->in_vain++;
        sched_yield();
        lock.lock();
    }
    block->holds = false, word.met = true, word.updating--, updating--;
}

// What its own last fence covers is published, and what the fences of others do that come before it, by a barrier: fences
// are sequentially consistent. (Another's last one may stand behind that barrier.)
static void add_fences_of_others(const Lane* lane, Word::Published& p) {
    const Block* block = lane->block;
    for (const Warp* w = block->warp; w < block->warp + block->warps; w++)
        for (const Lane* other = w->lanes; other < w->lanes + w->count; other++)
            for (const auto* fence : {&other->fence, &other->earlier_fence})
                if (other != lane && fence->time && before(other->id, fence->time, lane)) {
                    p.fences.push_back({(uint32_t)other->id, fence->time});
                    join(p.known.data(), fence->known.data(), block->warps);
                }
}
void meet(Lane* lane, uintptr_t address, bool learn, bool publish) {
    publish &= lane->fence.time != 0;
    const bool polls = learn && lane->in_vain > 0 && lane->polled == address;
    if (!publish && !polls && !(learn && any)) return;
    std::lock_guard<std::mutex> lock(mutex);
    auto it = words.find(address);
    if (it == words.end()) {
        if (!publish && !polls) return;
        it = words.emplace(address, Word()).first;
    }
    any = true;
    Word& word = it->second;
    Block* block = lane->block;
    auto looks = [&] { learn_of(block->learnt, &word, word.count), add_look(block->looked, lane, &word, word.count); };
    if (learn && word.count) looks();
    if (learn) note_look(word, lane, false);
    if (!publish) return;
    if (word.arriving == lane) word.arriving = nullptr;
    const Block::Learnt elsewhere = learnt_elsewhere(word, lane);
    if (!has_news(word, lane, elsewhere)) return;
    note_look(word, lane, true);
    block->published++;
    auto& mine = word.by_block[(uint32_t)block->number];
    mine.push_back({(uint32_t)block->number, ++word.count, (uint32_t)lane->id, lane->fence.time, lane->warp->time,
                    block->global_fences, lane->fence.known, {}, elsewhere});
    add_fences_of_others(lane, mine.back());
    if (learn) looks();
}

// Among what was published at these words (up to these numbers), and what their publishers had learnt?
static bool search(const Block::Learnt& learnt, const GlobalStamp& s, std::map<Word*, uint32_t>& seen, int& patience,
                   bool fenced) {
    for (auto& l : learnt) {
        uint32_t& before = seen[l.first];
        if (before >= l.second || --patience < 0) continue;
        const uint32_t from = before;
        before = l.second;
        auto it = l.first->by_block.find(s.block);
        if (it != l.first->by_block.end())
            for (auto& p : it->second)
                if (p.number <= l.second && (p.fenced || !fenced) && p.covers(s)) return true;
        for (auto& of_block : l.first->by_block)
            for (auto& p : of_block.second) {
                if (p.number <= from || p.number > l.second) continue;
                std::map<Word*, uint32_t> again;  // what was passed by for want of a fence
                const bool here = fenced && p.fenced;
                if ((here || !p.learnt.empty()) && search(p.learnt, s, here ? again : seen, patience, fenced && !here))
                    return true;
            }
    }
    return false;
}
bool known(const Lane* lane, const GlobalStamp& s, Knowledge how, bool fenced) {
    const Block* block = lane->block;
    if (block->learnt.empty()) return false;
    const Block::Learnt learnt =
        how == BY_BLOCK ? block->learnt : known_to(lane, how == ACQUIRED ? block->acquired : block->looked);
    std::lock_guard<std::mutex> lock(mutex);
    std::map<Word*, uint32_t> seen;
    int patience = 10000;
    return search(learnt, s, seen, patience, fenced && !block->global_fences);
}
uint32_t known_of_word(const Lane* lane, uintptr_t address) {
    if (lane->block->learnt.empty()) return 0;
    std::lock_guard<std::mutex> lock(mutex);
    const auto it = words.find(address);
    if (it == words.end()) return 0;
    for (auto& l : lane->block->learnt)
        if (l.first == &it->second) return l.second;
    return 0;
}
bool published_by(const GlobalStamp& s, uintptr_t address, uint32_t known) {
    if (!known) return false;
    std::lock_guard<std::mutex> lock(mutex);
    const auto it = words.find(address);
    if (it == words.end()) return false;
    for (auto& p : it->second.by_block[s.block])
        if (p.thread == s.thread && s.time <= p.now && p.number <= known) return true;
    return false;
}
void forget_order() {
    std::lock_guard<std::mutex> lock(mutex);
    words.clear();
    any = nobody_comes = false;
}

}  // namespace simt
