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
        uint32_t thread, time, now;   // time: of its fence
        bool fenced;                  // there had been a fence_proxy_async_global in its block
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
    if (!mine.empty()) {
        auto& last = mine.back();
        if (last.thread == (uint32_t)lane->id && last.time == lane->fence.time && last.now == lane->warp->time &&
            last.fenced == block->global_fences && last.learnt == elsewhere)
            return;  // it spins: there is nothing new
    }
    block->published++;
    mine.push_back({(uint32_t)block->number, ++word.count, (uint32_t)lane->id, lane->fence.time, lane->warp->time,
                    block->global_fences, lane->fence.known, elsewhere});
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
