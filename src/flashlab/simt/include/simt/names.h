// Names that a reader may have made macros of (#define N 64, -DT=float) before a header of ours is read: within it they
// are its own, up to names_end.h. Other names of a header that are no part of CUDA belong to it alone.
#define SIMT_NAMES(OF) \
    OF("A") OF("B") OF("C") OF("D") OF("E") OF("F") OF("G") OF("H") OF("I") OF("J") OF("K") OF("L") \
    OF("M") OF("N") OF("O") OF("P") OF("Q") OF("R") OF("S") OF("T") OF("U") OF("V") OF("W") OF("X") \
    OF("Y") OF("Z") OF("a") OF("b") OF("c") OF("d") OF("e") OF("f") OF("g") OF("h") OF("i") OF("j") \
    OF("k") OF("l") OF("m") OF("n") OF("o") OF("p") OF("q") OF("r") OF("s") OF("t") OF("u") OF("v") \
    OF("w") OF("x") OF("y") OF("z") OF("min") OF("max") OF("BYTES") OF("PENDING") OF("TRANS_A") \
    OF("TRANS_B") OF("TYPE") OF("Bits") OF("Closure") OF("H2") OF("V4") OF("V8")
#define SIMT_PRAGMA(text) _Pragma(#text)
#define SIMT_PUSH(name) SIMT_PRAGMA(push_macro(name))
#define SIMT_POP(name) SIMT_PRAGMA(pop_macro(name))
SIMT_NAMES(SIMT_PUSH)
#undef A
#undef B
#undef C
#undef D
#undef E
#undef F
#undef G
#undef H
#undef I
#undef J
#undef K
#undef L
#undef M
#undef N
#undef O
#undef P
#undef Q
#undef R
#undef S
#undef T
#undef U
#undef V
#undef W
#undef X
#undef Y
#undef Z
#undef a
#undef b
#undef c
#undef d
#undef e
#undef f
#undef g
#undef h
#undef i
#undef j
#undef k
#undef l
#undef m
#undef n
#undef o
#undef p
#undef q
#undef r
#undef s
#undef t
#undef u
#undef v
#undef w
#undef x
#undef y
#undef z
#undef min
#undef max
#undef BYTES
#undef PENDING
#undef TRANS_A
#undef TRANS_B
#undef TYPE
#undef Bits
#undef Closure
#undef H2
#undef V4
#undef V8
