// Capitals and a few more names that a reader may have made macros of (#define N 64, -DT=float) before a header of
// ours is read: within it they are its own, up to names_end.h. A name of ours that is no part of CUDA belongs to us.
#define SIMT_NAMES(OF) \
    OF("A") OF("B") OF("C") OF("F") OF("H") OF("K") OF("N") OF("P") OF("T") OF("min") OF("max") \
    OF("BYTES") OF("PENDING") OF("TRANS_A") OF("TRANS_B") OF("TYPE") OF("Bits") OF("H2") OF("V4") \
    OF("V8")
#define SIMT_PRAGMA(text) _Pragma(#text)
#define SIMT_PUSH(name) SIMT_PRAGMA(push_macro(name))
#define SIMT_POP(name) SIMT_PRAGMA(pop_macro(name))
SIMT_NAMES(SIMT_PUSH)
#undef A
#undef B
#undef C
#undef F
#undef H
#undef K
#undef N
#undef P
#undef T
#undef min
#undef max
#undef BYTES
#undef PENDING
#undef TRANS_A
#undef TRANS_B
#undef TYPE
#undef Bits
#undef H2
#undef V4
#undef V8
