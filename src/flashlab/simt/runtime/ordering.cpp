// Fences and the words that threads meet at: see ordering.h.
#include "ordering.h"
#include "faults.h"
#include <sched.h>
#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <unordered_map>

namespace simt {

struct Word {
    struct Published {
        uint32_t block, number;  // the number-th of this word
        uint32_t thread, time, now;   // time: of its fence
        bool fenced;                  // there had been a fence_proxy_async_global in its block
        std::vector<uint32_t> known;  // of the block's warps
        Block::Learnt learnt;         // of other blocks, at other words: who learns of this has learnt this word's
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
};

constexpr std::chrono::milliseconds PATIENCE(200);  // of who publishes, with those that watch

static std::mutex mutex;
static std::map<uintptr_t, Word> words;
static std::atomic<bool> any{false};

void fence(Lane* lane) {
    Warp* w = lane->warp;
    lane->fence.time = w->time;
    lane->fence.known.assign(w->known, w->known + lane->block->warps);
    w->time++;  // what the lane does from here on is not covered
}

static void learn_of(Block::Learnt& learnt, Word* word, uint32_t count) {
    for (auto& l : learnt)
        if (l.first == word) {
            l.second = std::max(l.second, count);
            return;
        }
    learnt.push_back({word, count});
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

// What the lane's block has learnt at other words; and whether it has news to publish at this one, or merely spins.
static Block::Learnt learnt_elsewhere(const Word& word, const Lane* lane) {
    Block::Learnt elsewhere;
    for (auto& l : lane->block->learnt)
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
    if (learn && word.count) learn_of(block->learnt, &word, word.count);
    if (learn) note_look(word, lane, false);
    if (!publish) return;
    if (word.arriving == lane) word.arriving = nullptr;
    const Block::Learnt elsewhere = learnt_elsewhere(word, lane);
    if (!has_news(word, lane, elsewhere)) return;
    note_look(word, lane, true);
    block->published++;
    word.by_block[(uint32_t)block->number].push_back({(uint32_t)block->number, ++word.count, (uint32_t)lane->id,
                                                      lane->fence.time, lane->warp->time, block->global_fences,
                                                      lane->fence.known, elsewhere});
    if (learn) learn_of(block->learnt, &word, word.count);
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
                if (p.number <= l.second && (p.fenced || !fenced) &&
                    (s.thread == p.thread ? s.time <= p.time : s.time <= p.known[s.thread / WARP]))
                    return true;
        for (auto& of_block : l.first->by_block)
            for (auto& p : of_block.second) {
                if (p.number <= from || p.number > l.second) continue;
                std::map<Word*, uint32_t> again;  // what was passed by for want of a fence
                const bool here = fenced && p.fenced;
                if ((here || !p.learnt.empty()) &&
                    search(p.learnt, s, here ? again : seen, patience, fenced && !here))
                    return true;
            }
    }
    return false;
}
bool known(const Lane* lane, const GlobalStamp& s, bool fenced) {
    if (lane->block->learnt.empty()) return false;
    std::lock_guard<std::mutex> lock(mutex);
    std::map<Word*, uint32_t> seen;
    int patience = 10000;
    return search(lane->block->learnt, s, seen, patience, fenced && !lane->block->global_fences);
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
    any = false;
}

}  // namespace simt
