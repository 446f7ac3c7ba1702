// Fences and the words that threads meet at: see ordering.h.
#include "ordering.h"
#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>

namespace simt {

struct Word {
    struct Published {
        uint32_t block, number;  // the number-th of this word
        uint32_t thread, time;
        std::vector<uint32_t> known;  // of the block's warps
        Block::Learnt learnt;         // of other blocks, at other words: who learns of this has learnt this word's
    };
    std::unordered_map<uint32_t, std::vector<Published>> by_block;
    uint32_t count = 0;
};

static std::mutex mutex;
static std::map<uintptr_t, Word> words;
static std::atomic<bool> any{false};

void fence(Lane* lane) {
    Warp* w = lane->warp;
    lane->fence.time = w->time;
    lane->fence.known.assign(w->known, w->known + lane->block->warps);
    w->time++;  // what the lane does from here on is not covered
}

// What is loaded, or updated, after meet() may be of somebody who has published since. So it is learnt once more when
// it has been loaded: at the latest moment, and never less than what the value tells.
void settle_load(Lane* lane) {
    meet(lane, lane->loaded, true, false);
    lane->loaded = 0;
}

static void learn_of(Block::Learnt& learnt, Word* word, uint32_t count) {
    for (auto& l : learnt)
        if (l.first == word) {
            l.second = std::max(l.second, count);
            return;
        }
    learnt.push_back({word, count});
}

void meet(Lane* lane, uintptr_t address, bool learn, bool publish) {
    publish &= lane->fence.time != 0;
    if (learn) lane->loaded = address;
    if (!publish && !(learn && any)) return;
    std::lock_guard<std::mutex> lock(mutex);
    auto it = words.find(address);
    if (it == words.end()) {
        if (!publish) return;
        it = words.emplace(address, Word()).first;
        any = true;
    }
    Word& word = it->second;
    Block* block = lane->block;
    if (learn && word.count) learn_of(block->learnt, &word, word.count);
    if (!publish) return;
    auto& mine = word.by_block[(uint32_t)block->number];
    Block::Learnt elsewhere;
    for (auto& l : block->learnt)
        if (l.first != &word) elsewhere.push_back(l);
    if (!mine.empty() && mine.back().thread == (uint32_t)lane->id && mine.back().time == lane->fence.time &&
        mine.back().learnt == elsewhere)
        return;  // it spins: there is nothing new
    block->published++;
    mine.push_back({(uint32_t)block->number, ++word.count, (uint32_t)lane->id, lane->fence.time, lane->fence.known,
                    elsewhere});
    if (learn) learn_of(block->learnt, &word, word.count);
}

// Among what was published at these words (up to these numbers), and what their publishers had learnt?
static bool search(const Block::Learnt& learnt, const GlobalStamp& s, std::map<Word*, uint32_t>& seen, int& patience) {
    for (auto& l : learnt) {
        uint32_t& before = seen[l.first];
        if (before >= l.second || --patience < 0) continue;
        const uint32_t from = before;
        before = l.second;
        auto it = l.first->by_block.find(s.block);
        if (it != l.first->by_block.end())
            for (auto& p : it->second)
                if (p.number <= l.second &&
                    (s.thread == p.thread ? s.time <= p.time : s.time <= p.known[s.thread / WARP]))
                    return true;
        for (auto& of_block : l.first->by_block)
            for (auto& p : of_block.second)
                if (p.number > from && p.number <= l.second && !p.learnt.empty() &&
                    search(p.learnt, s, seen, patience))
                    return true;
    }
    return false;
}
bool known(const Lane* lane, const GlobalStamp& s) {
    if (lane->block->learnt.empty()) return false;
    std::lock_guard<std::mutex> lock(mutex);
    std::map<Word*, uint32_t> seen;
    int patience = 10000;
    return search(lane->block->learnt, s, seen, patience);
}
void forget_order() {
    std::lock_guard<std::mutex> lock(mutex);
    words.clear();
    any = false;
}

}  // namespace simt
