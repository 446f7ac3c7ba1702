// The matrix descriptor of wgmma: which 16 bytes of shared memory hold which 8 numbers (wgmma.cuh says it in
// words). Nothing is taken for granted: strides and base offset are what the descriptor says, sense or not.
#pragma once
#include <stdint.h>

namespace simt {

struct Descriptor {
    uint32_t start, leading, stride;  // bytes
    uint32_t base;                    // of the pattern: its first line of 128 bytes, of 8
    uint32_t width;                   // of a row of the swizzle, in pieces of 16 bytes: 8, 4, 2; 1 is no swizzle

    explicit Descriptor(uint64_t bits) {
        static const uint8_t widths[4] = {1, 8, 4, 2};
        start = (bits & 0x3fff) << 4, leading = (bits >> 16 & 0x3fff) << 4, stride = (bits >> 32 & 0x3fff) << 4;
        base = bits >> 49 & 7, width = widths[bits >> 62];
    }
    // K-major: piece `half` (0 or 1) of the 16 numbers of a row of M or N.
    uint32_t k_major(uint32_t row, uint32_t half) const {
        return swizzled(start + row % 8 * width * 16 + row / 8 * stride + half * (width > 1 ? 16 : leading));
    }
    // MN-major: the 8 numbers 8 piece, ... of M or N at one k.
    uint32_t mn_major(uint32_t piece, uint32_t k) const {
        return width > 1 ? swizzled(start + k % 8 * width * 16 + k / 8 * stride + piece % width * 16 +
                                    piece / width * leading)
                         : (start + k % 8 * 16 + k / 8 * leading + piece * stride) & 0x3ffff;
    }

private:
    uint32_t swizzled(uint32_t address) const {
        address &= 0x3ffff;  // the address space that a descriptor can name
        return address ^ (((address >> 7) - base) & (width - 1)) << 4;
    }
};

}  // namespace simt
