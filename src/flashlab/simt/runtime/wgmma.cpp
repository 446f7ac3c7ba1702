// The arithmetic of wgmma: which lane holds which element, and what is computed.
#include "descriptor.h"
#include "../include/simt/half_bits.h"
#include "values.h"
#include "warpgroup.h"
#include <algorithm>

namespace simt {

static void unpack(const uint16_t* from, bool bf16, float* to) {  // a piece: 8 numbers
    if (bf16)
        for (int i = 0; i < 8; i++) to[i] = simt_bf16_to_float(from[i]);
    else
        for (int i = 0; i < 8; i++) to[i] = simt_half_to_float(from[i]);
}

// sums += four rows of A times B, in pieces that stay in the CPU's registers. `sums` has rows of 256.
typedef float Eight __attribute__((vector_size(32)));
static void multiply_rows(const float (*a)[16], const float (*b)[256], float (*sums)[256], int n) {
    for (int j = 0; j < n; j += 16) {
        auto at = [j](float* row, int half) -> Eight& { return *(Eight*)(row + j + 8 * half); };
        Eight s00 = at(sums[0], 0), s01 = at(sums[0], 1), s10 = at(sums[1], 0), s11 = at(sums[1], 1);
        Eight s20 = at(sums[2], 0), s21 = at(sums[2], 1), s30 = at(sums[3], 0), s31 = at(sums[3], 1);
        for (int k = 0; k < 16; k++) {
            const Eight x0 = at((float*)b[k], 0), x1 = at((float*)b[k], 1);
            s00 += a[0][k] * x0, s01 += a[0][k] * x1;
            s10 += a[1][k] * x0, s11 += a[1][k] * x1;
            s20 += a[2][k] * x0, s21 += a[2][k] * x1;
            s30 += a[3][k] * x0, s31 += a[3][k] * x1;
        }
        at(sums[0], 0) = s00, at(sums[0], 1) = s01, at(sums[1], 0) = s10, at(sums[1], 1) = s11;
        at(sums[2], 0) = s20, at(sums[2], 1) = s21, at(sums[3], 0) = s30, at(sums[3], 1) = s31;
    }
}

// Products of two 16-bit numbers are exact in float. Each addition is rounded to nearest here, one after the other; tensor
// cores add several numbers at once and cut off what is below the largest one's last bits: the last place may differ.
void Warpgroups::multiply(const Product& p, Block* block, int group) {
    const bool bf16 = p.variant & SIMT_WGMMA_BF16;
    const uint8_t* shared = (const uint8_t*)worker->window.base;
    auto piece = [&](uint32_t address, float* to) {
        uint16_t bits[8];
        if (address == NOWHERE) memset(bits, 0xff, sizeof bits);
        else memcpy(bits, shared + address, sizeof bits);
        unpack(bits, bf16, to);
    };
    float eight[8];
    if (p.variant & SIMT_WGMMA_RS) {
        for (int t = 0; t < GROUP_LANES; t++) {
            const int row = t / WARP * 16 + t % WARP / 4, column = t % 4 * 2;
            uint16_t bits[8];
            memcpy(bits, p.a_registers[t], sizeof bits);
            unpack(bits, bf16, eight);
            for (int i = 0; i < 4; i++) memcpy(&a[row + i % 2 * 8][column + i / 2 * 8], &eight[2 * i], 8);
        }
    } else {
        for (int i = 0; i < 128; i++) {
            piece(p.a_pieces[i], eight);
            if (p.variant & SIMT_WGMMA_TRANS_A)
                for (int m = 0; m < 8; m++) a[i % 8 * 8 + m][i / 8] = eight[m];
            else memcpy(&a[i / 2][i % 2 * 8], eight, sizeof eight);
        }
    }
    const int across = p.n / 8;  // pieces
    for (int i = 0; i < 2 * p.n; i++) {
        piece(p.b_pieces[i], eight);
        if (p.variant & SIMT_WGMMA_TRANS_B) memcpy(&b[i / across][i % across * 8], eight, sizeof eight);
        else
            for (int k = 0; k < 8; k++) b[i % 2 * 8 + k][i / 2] = eight[k];
    }
    for (int row = 0; row < 64; row += 4) {
        const int half = row % 16 / 8 * 2;  // which of a lane's accumulators
        for (int r = 0; r < 4; r++) {
            float* const* d = &p.d[row / 16 * WARP + (row + r) % 8 * 4];  // of the four lanes that hold the row
            if (p.add) {
                for (int j = 0; j < across; j++)
                    for (int t = 0; t < 4; t++) memcpy(&sums[r][8 * j + 2 * t], &d[t][4 * j + half], 8);
                uint32_t unset = 0;
                for (int j = 0; j < p.n; j++) {
                    uint32_t bits;
                    memcpy(&bits, &sums[r][j], 4);
                    unset |= bits == NEVER_SET;
                }
                if (unset) {
                    const int first = group * GROUP_LANES + row / 16 * WARP + (row + r) % 8 * 4;
                    file_never_set(&block->lane[first], "wgmma's accumulator", p.pc);
                }
            } else {
                memset(sums[r], 0, p.n * sizeof(float));
            }
        }
        multiply_rows(a + row, b, sums, p.n);
        for (int r = 0; r < 4; r++) {
            float* const* d = &p.d[row / 16 * WARP + (row + r) % 8 * 4];
            for (int j = 0; j < across; j++)
                for (int t = 0; t < 4; t++) memcpy(&d[t][4 * j + half], &sums[r][8 * j + 2 * t], 8);
        }
    }
}

}  // namespace simt
