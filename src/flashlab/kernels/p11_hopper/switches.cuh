// switches.cuh - phase 11, the macros of steps 7 and 9, and what they are where nobody says it.

// region: switches
#ifndef PING_PONG                                              // the consumers take turns
#define PING_PONG 1
#endif
#ifndef DYNAMIC                                                // 0 divides parts beforehand; p11_flash's 1 equal ones
#define DYNAMIC 1
#endif
// endregion
