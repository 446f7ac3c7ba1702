// ldmatrix, stmatrix and mma: which lane holds which element, and what is computed.
#include "../include/simt/half_bits.h"
#include "mbarrier.h"
#include "shadow.h"
#include "values.h"
#include <algorithm>

namespace simt {

// ---- ldmatrix and stmatrix ----------------------------------------------------------------------
// Lane 8 i + r brings the address of row r of tile i: 8 numbers of 16 bits. Register i of lane l holds
// elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1) of tile i, or of its transpose.
struct Rows {
    uint64_t address[4][8];
    uint8_t* row[4][8];  // null: the address is wrong, and the finding filed
};
static Rows find_rows(Warp* warp, const Slot& slot, int count, bool write) {
    Worker* worker = warp->block->worker;
    const Kind kind = write ? STMATRIX : LDMATRIX;
    const char* how = write ? "stmatrix" : "ldmatrix";
    const int site = worker->sites->find(slot.pc, kind);
    Site& s = (*worker->sites)[site];
    Rows rows;
    s.count[0]++;
    for (int i = 0; i < count; i++) {
        for (int r = 0; r < 8; r++) {
            Lane* lane = &warp->lanes[8 * i + r];
            const uint64_t a = *(const uint32_t*)lane->in;  // the address comes first in both operand lists
            rows.address[i][r] = a;
            rows.row[i][r] = nullptr;
            if (a % 16) file_fatal(lane, {"misaligned", how, "", {(int64_t)a, 16}}, cudaErrorMisalignedAddress);
            if (!worker->shadow->in_bounds(lane, a, 16, how)) continue;
            if (warp->block->launch->checked)
                worker->shadow->touch(lane, a, 16, write ? WRITE : READ, site, how, nullptr);
            if (warp->block->launch->checked && !write && !worker->mbarriers->all.empty())
                warp->loading.push_back({(uint32_t)a, lane->id, site});
            rows.row[i][r] = (uint8_t*)worker->window.base + a;
        }
        s.count[1] += shared_wavefronts(rows.address[i], 0xff, 16, !write).needed;  // a tile is 128 bytes: one at best
        s.count[2]++;
        s.count[3] += 128;
    }
    return rows;
}

void load_matrix(Warp* warp, const Slot& slot) {
    const int count = slot.param & 7;
    const bool trans = slot.param & SIMT_MATRIX_TRANS;
    const Rows rows = find_rows(warp, slot, count, false);
    for (int i = 0; i < count; i++) {
        uint16_t tile[8][8];
        for (int r = 0; r < 8; r++)
            if (rows.row[i][r]) memcpy(tile[r], rows.row[i][r], 16);
            else memset(tile[r], 0xff, 16);
        for (int l = 0; l < WARP; l++) {
            const int g = l / 4, t = l % 4 * 2;
            const uint32_t low = trans ? tile[t][g] : tile[g][t], high = trans ? tile[t + 1][g] : tile[g][t + 1];
            ((uint32_t*)warp->lanes[l].out)[i] = low | high << 16;
        }
    }
}
void store_matrix(Warp* warp, const Slot& slot) {
    const int count = slot.param & 7;
    const bool trans = slot.param & SIMT_MATRIX_TRANS;
    warp->loading.clear();
    const Rows rows = find_rows(warp, slot, count, true);
    for (int i = 0; i < count; i++) {
        uint16_t tile[8][8];
        for (int l = 0; l < WARP; l++) {
            const int g = l / 4, t = l % 4 * 2;
            const uint32_t r = ((const SimtStmatrixIn*)warp->lanes[l].in)->r[i];
            if (r == NEVER_SET) file_never_set(&warp->lanes[l], "stmatrix", slot.pc);
            (trans ? tile[t][g] : tile[g][t]) = (uint16_t)r;
            (trans ? tile[t + 1][g] : tile[g][t + 1]) = (uint16_t)(r >> 16);
        }
        for (int r = 0; r < 8; r++)
            if (rows.row[i][r]) memcpy(rows.row[i][r], tile[r], 16);
    }
}

// ---- mma ----------------------------------------------------------------------------------------
static void check_operands(Lane* lane, const char* what, const uint32_t* words, int count, uintptr_t pc) {
    for (int i = 0; i < count; i++)
        if (words[i] == NEVER_SET) return file_never_set(lane, what, pc);
}
// Whether a cp.async of any thread of the block has been issued and not been waited for.
static bool copies_under_way(const Block* block) {
    for (int t = 0; t < block->threads; t++)
        if (block->lane[t].first_copy < block->lane[t].copies.size()) return true;
    return false;
}
// Groups from the oldest to the youngest such copy of a lane: the largest number of the warp's lanes.
static int groups_under_way(const Warp* warp) {
    int most = 0;
    for (int l = 0; l < warp->count; l++) {
        const Lane& lane = warp->lanes[l];
        if (lane.first_copy < lane.copies.size())
            most = std::max(most, (int)(lane.copies.back().group - lane.copies[lane.first_copy].group) + 1);
    }
    return most;
}

void multiply(Warp* warp, const Slot& slot) {
    const bool bf16 = slot.param & SIMT_MMA_BF16, acc16 = slot.param & SIMT_MMA_ACC_F16;
    const int k_size = slot.param & SIMT_M16N8K8 ? 8 : 16;
    warp->loading.clear();
    Sites& sites = *warp->block->worker->sites;
    Site& site = sites[sites.find(slot.pc, k_size == 8 ? MMA_M16N8K8 : MMA_M16N8K16)];
    site.count[0]++;
    site.count[1] += 2 * 16 * 8 * k_size;
    site.count[2] += copies_under_way(warp->block);
    site.count[3] += groups_under_way(warp);

    // Gather the fragments into matrices: A is 16 x k, B k x 8, C 16 x 8. Products of two 16-bit numbers are
    // exact in float. Each addition is rounded to nearest here, one after the other; tensor cores add several numbers
    // at once and cut off what is below the largest one's last bits: the last place may differ.
    uint32_t a16[16][16], b16[16][8];
    float a[16][16], b[16][8], c[16][8];
    for (int l = 0; l < WARP; l++) {
        const SimtMmaIn& in = *(const SimtMmaIn*)warp->lanes[l].in;
        check_operands(&warp->lanes[l], "mma's accumulator", in.c, acc16 ? 2 : 4, slot.pc);
        check_operands(&warp->lanes[l], "mma's A", in.a, k_size / 4, slot.pc);
        check_operands(&warp->lanes[l], "mma's B", in.b, k_size / 8, slot.pc);
        const int g = l / 4, t = l % 4 * 2;
        for (int i = 0; i < k_size / 4; i++) {
            uint32_t* at = &a16[g + i % 2 * 8][t + i / 2 * 8];
            at[0] = in.a[i] & 0xffff, at[1] = in.a[i] >> 16;
        }
        for (int i = 0; i < k_size / 8; i++)
            b16[t + i * 8][g] = in.b[i] & 0xffff, b16[t + i * 8 + 1][g] = in.b[i] >> 16;
        for (int i = 0; i < 4; i++) {
            float& at = c[g + i / 2 * 8][t + i % 2];
            if (acc16) at = simt_half_to_float(in.c[i / 2] >> i % 2 * 16 & 0xffff);
            else memcpy(&at, &in.c[i], 4);
        }
    }
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < k_size; k++) a[i][k] = bf16 ? simt_bf16_to_float(a16[i][k]) : simt_half_to_float(a16[i][k]);
    for (int k = 0; k < k_size; k++)
        for (int j = 0; j < 8; j++) b[k][j] = bf16 ? simt_bf16_to_float(b16[k][j]) : simt_half_to_float(b16[k][j]);
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < k_size; k++)
            for (int j = 0; j < 8; j++) c[i][j] += a[i][k] * b[k][j];
    for (int l = 0; l < WARP; l++) {
        uint32_t* out = (uint32_t*)warp->lanes[l].out;
        const int g = l / 4, t = l % 4 * 2;
        for (int i = 0; i < 2; i++) {
            const float* at = &c[g + i * 8][t];
            if (acc16) out[i] = simt_float_to_half(at[0]) | (uint32_t)simt_float_to_half(at[1]) << 16;
            else memcpy(&out[2 * i], at, 8);
        }
    }
}

}  // namespace simt
