// The arithmetic of wgmma: which lane holds which element, and what is computed.
#include "descriptor.h"
#include "halves.h"
#include "values.h"
#include "warpgroup.h"
#include <algorithm>

namespace simt {

static void unpack(const uint16_t* from, bool bf16, float* to) {  // a piece: 8 numbers
    if (bf16)
        for (int i = 0; i < 8; i++) to[i] = bf16_bits_to_float(from[i]);
    else
        for (int i = 0; i < 8; i++) to[i] = half_bits_to_float(from[i]);
}

// sums += row of A times B, for columns in blocks that stay in the CPU's registers.
typedef float Eight __attribute__((vector_size(32)));
static void multiply_row(const float* row, const float (*b)[256], float* sums, int n) {
    for (int j = 0; j < n; j += 32) {
        Eight s[4];
        memcpy(s, sums + j, sizeof s);
        for (int k = 0; k < 16; k++) {
            Eight x[4];
            memcpy(x, b[k] + j, sizeof x);
            for (int i = 0; i < 4; i++) s[i] += row[k] * x[i];
        }
        memcpy(sums + j, s, sizeof s);
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
    for (int row = 0; row < 64; row++) {
        const int first = row / 16 * WARP + row % 8 * 4, half = row % 16 / 8 * 2;  // whose accumulators, and which
        if (p.add) {
            for (int t = 0; t < 4; t++)
                for (int j = 0; j < across; j++) memcpy(&sums[8 * j + 2 * t], &p.d[first + t][4 * j + half], 8);
            uint32_t unset = 0;
            for (int j = 0; j < p.n; j++) {
                uint32_t bits;
                memcpy(&bits, &sums[j], 4);
                unset |= bits == NEVER_SET;
            }
            if (unset) file_never_set(&block->lane[group * GROUP_LANES + first], "wgmma's accumulator", p.pc);
        } else {
            memset(sums, 0, p.n * sizeof(float));
        }
        multiply_row(a[row], b, sums, p.n);
        for (int t = 0; t < 4; t++)
            for (int j = 0; j < across; j++) memcpy(&p.d[first + t][4 * j + half], &sums[8 * j + 2 * t], 8);
    }
}

}  // namespace simt
