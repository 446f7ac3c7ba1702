// The inline PTX of wgmma.cuh for each N. The instruction names each of its registers, so that no template can spell it.
//
// WGMMA_NAMES_n are the accumulators as the instruction names them, WGMMA_SUMS_n(d) the same as operands. After them
// come the operands numbered i0, i1, ...: of ss the two descriptors, scale-d, trans-a and trans-b; of rs the four
// registers of A, the descriptor of B, scale-d and trans-b.
#pragma once

#define WGMMA_NAMES_8 "%0, %1, %2, %3"
#define WGMMA_NAMES_16 WGMMA_NAMES_8 ", %4, %5, %6, %7"
#define WGMMA_NAMES_24 WGMMA_NAMES_16 ", %8, %9, %10, %11"
#define WGMMA_NAMES_32 WGMMA_NAMES_24 ", %12, %13, %14, %15"
#define WGMMA_NAMES_40 WGMMA_NAMES_32 ", %16, %17, %18, %19"
#define WGMMA_NAMES_48 WGMMA_NAMES_40 ", %20, %21, %22, %23"
#define WGMMA_NAMES_56 WGMMA_NAMES_48 ", %24, %25, %26, %27"
#define WGMMA_NAMES_64 WGMMA_NAMES_56 ", %28, %29, %30, %31"
#define WGMMA_NAMES_72 WGMMA_NAMES_64 ", %32, %33, %34, %35"
#define WGMMA_NAMES_80 WGMMA_NAMES_72 ", %36, %37, %38, %39"
#define WGMMA_NAMES_88 WGMMA_NAMES_80 ", %40, %41, %42, %43"
#define WGMMA_NAMES_96 WGMMA_NAMES_88 ", %44, %45, %46, %47"
#define WGMMA_NAMES_104 WGMMA_NAMES_96 ", %48, %49, %50, %51"
#define WGMMA_NAMES_112 WGMMA_NAMES_104 ", %52, %53, %54, %55"
#define WGMMA_NAMES_120 WGMMA_NAMES_112 ", %56, %57, %58, %59"
#define WGMMA_NAMES_128 WGMMA_NAMES_120 ", %60, %61, %62, %63"
#define WGMMA_NAMES_136 WGMMA_NAMES_128 ", %64, %65, %66, %67"
#define WGMMA_NAMES_144 WGMMA_NAMES_136 ", %68, %69, %70, %71"
#define WGMMA_NAMES_152 WGMMA_NAMES_144 ", %72, %73, %74, %75"
#define WGMMA_NAMES_160 WGMMA_NAMES_152 ", %76, %77, %78, %79"
#define WGMMA_NAMES_168 WGMMA_NAMES_160 ", %80, %81, %82, %83"
#define WGMMA_NAMES_176 WGMMA_NAMES_168 ", %84, %85, %86, %87"
#define WGMMA_NAMES_184 WGMMA_NAMES_176 ", %88, %89, %90, %91"
#define WGMMA_NAMES_192 WGMMA_NAMES_184 ", %92, %93, %94, %95"
#define WGMMA_NAMES_200 WGMMA_NAMES_192 ", %96, %97, %98, %99"
#define WGMMA_NAMES_208 WGMMA_NAMES_200 ", %100, %101, %102, %103"
#define WGMMA_NAMES_216 WGMMA_NAMES_208 ", %104, %105, %106, %107"
#define WGMMA_NAMES_224 WGMMA_NAMES_216 ", %108, %109, %110, %111"
#define WGMMA_NAMES_232 WGMMA_NAMES_224 ", %112, %113, %114, %115"
#define WGMMA_NAMES_240 WGMMA_NAMES_232 ", %116, %117, %118, %119"
#define WGMMA_NAMES_248 WGMMA_NAMES_240 ", %120, %121, %122, %123"
#define WGMMA_NAMES_256 WGMMA_NAMES_248 ", %124, %125, %126, %127"
#define WGMMA_SUMS_8(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define WGMMA_SUMS_16(d) WGMMA_SUMS_8(d), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define WGMMA_SUMS_24(d) WGMMA_SUMS_16(d), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define WGMMA_SUMS_32(d) WGMMA_SUMS_24(d), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define WGMMA_SUMS_40(d) WGMMA_SUMS_32(d), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define WGMMA_SUMS_48(d) WGMMA_SUMS_40(d), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define WGMMA_SUMS_56(d) WGMMA_SUMS_48(d), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define WGMMA_SUMS_64(d) WGMMA_SUMS_56(d), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define WGMMA_SUMS_72(d) WGMMA_SUMS_64(d), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define WGMMA_SUMS_80(d) WGMMA_SUMS_72(d), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define WGMMA_SUMS_88(d) WGMMA_SUMS_80(d), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define WGMMA_SUMS_96(d) WGMMA_SUMS_88(d), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define WGMMA_SUMS_104(d) WGMMA_SUMS_96(d), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define WGMMA_SUMS_112(d) WGMMA_SUMS_104(d), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define WGMMA_SUMS_120(d) WGMMA_SUMS_112(d), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define WGMMA_SUMS_128(d) WGMMA_SUMS_120(d), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define WGMMA_SUMS_136(d) WGMMA_SUMS_128(d), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define WGMMA_SUMS_144(d) WGMMA_SUMS_136(d), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define WGMMA_SUMS_152(d) WGMMA_SUMS_144(d), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define WGMMA_SUMS_160(d) WGMMA_SUMS_152(d), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define WGMMA_SUMS_168(d) WGMMA_SUMS_160(d), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define WGMMA_SUMS_176(d) WGMMA_SUMS_168(d), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define WGMMA_SUMS_184(d) WGMMA_SUMS_176(d), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define WGMMA_SUMS_192(d) WGMMA_SUMS_184(d), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define WGMMA_SUMS_200(d) WGMMA_SUMS_192(d), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define WGMMA_SUMS_208(d) WGMMA_SUMS_200(d), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define WGMMA_SUMS_216(d) WGMMA_SUMS_208(d), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define WGMMA_SUMS_224(d) WGMMA_SUMS_216(d), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define WGMMA_SUMS_232(d) WGMMA_SUMS_224(d), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define WGMMA_SUMS_240(d) WGMMA_SUMS_232(d), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define WGMMA_SUMS_248(d) WGMMA_SUMS_240(d), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define WGMMA_SUMS_256(d) WGMMA_SUMS_248(d), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

#define WGMMA_FUNCTIONS(N, TYPE, i0, i1, i2, i3, i4, i5, i6)                                                           \
    template <int TRANS_A, int TRANS_B>                                                                                \
    static __device__ __forceinline__ void ss_##TYPE(float (&d)[N / 2], uint64_t a, uint64_t b, int add) {             \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2 ", 0;\n"                                                 \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE                                 \
                     " {" WGMMA_NAMES_##N "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4 ";\n}"                     \
                     : WGMMA_SUMS_##N(d)                                                                               \
                     : "l"(a), "l"(b), "r"(add), "n"(TRANS_A), "n"(TRANS_B));                                          \
    }                                                                                                                  \
    template <int TRANS_B>                                                                                             \
    static __device__ __forceinline__ void rs_##TYPE(float (&d)[N / 2], const uint32_t* a, uint64_t b, int add) {      \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5 ", 0;\n"                                                 \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE                                 \
                     " {" WGMMA_NAMES_##N "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4                         \
                     ", p, 1, 1, %" #i6 ";\n}"                                                                         \
                     : WGMMA_SUMS_##N(d)                                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANS_B));                    \
    }
#define WGMMA_SHAPE(N, ...)                                                                                            \
    template <>                                                                                                        \
    struct WgmmaShape<N> {                                                                                             \
        WGMMA_FUNCTIONS(N, f16, __VA_ARGS__)                                                                           \
        WGMMA_FUNCTIONS(N, bf16, __VA_ARGS__)                                                                          \
    };

template <int N>
struct WgmmaShape;
WGMMA_SHAPE(8, 4, 5, 6, 7, 8, 9, 10)
WGMMA_SHAPE(16, 8, 9, 10, 11, 12, 13, 14)
WGMMA_SHAPE(24, 12, 13, 14, 15, 16, 17, 18)
WGMMA_SHAPE(32, 16, 17, 18, 19, 20, 21, 22)
WGMMA_SHAPE(40, 20, 21, 22, 23, 24, 25, 26)
WGMMA_SHAPE(48, 24, 25, 26, 27, 28, 29, 30)
WGMMA_SHAPE(56, 28, 29, 30, 31, 32, 33, 34)
WGMMA_SHAPE(64, 32, 33, 34, 35, 36, 37, 38)
WGMMA_SHAPE(72, 36, 37, 38, 39, 40, 41, 42)
WGMMA_SHAPE(80, 40, 41, 42, 43, 44, 45, 46)
WGMMA_SHAPE(88, 44, 45, 46, 47, 48, 49, 50)
WGMMA_SHAPE(96, 48, 49, 50, 51, 52, 53, 54)
WGMMA_SHAPE(104, 52, 53, 54, 55, 56, 57, 58)
WGMMA_SHAPE(112, 56, 57, 58, 59, 60, 61, 62)
WGMMA_SHAPE(120, 60, 61, 62, 63, 64, 65, 66)
WGMMA_SHAPE(128, 64, 65, 66, 67, 68, 69, 70)
WGMMA_SHAPE(136, 68, 69, 70, 71, 72, 73, 74)
WGMMA_SHAPE(144, 72, 73, 74, 75, 76, 77, 78)
WGMMA_SHAPE(152, 76, 77, 78, 79, 80, 81, 82)
WGMMA_SHAPE(160, 80, 81, 82, 83, 84, 85, 86)
WGMMA_SHAPE(168, 84, 85, 86, 87, 88, 89, 90)
WGMMA_SHAPE(176, 88, 89, 90, 91, 92, 93, 94)
WGMMA_SHAPE(184, 92, 93, 94, 95, 96, 97, 98)
WGMMA_SHAPE(192, 96, 97, 98, 99, 100, 101, 102)
WGMMA_SHAPE(200, 100, 101, 102, 103, 104, 105, 106)
WGMMA_SHAPE(208, 104, 105, 106, 107, 108, 109, 110)
WGMMA_SHAPE(216, 108, 109, 110, 111, 112, 113, 114)
WGMMA_SHAPE(224, 112, 113, 114, 115, 116, 117, 118)
WGMMA_SHAPE(232, 116, 117, 118, 119, 120, 121, 122)
WGMMA_SHAPE(240, 120, 121, 122, 123, 124, 125, 126)
WGMMA_SHAPE(248, 124, 125, 126, 127, 128, 129, 130)
WGMMA_SHAPE(256, 128, 129, 130, 131, 132, 133, 134)
