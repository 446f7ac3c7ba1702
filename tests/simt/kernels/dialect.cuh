#pragma once
#include "simt.h"
template <class K, class... A>
void launch_in_header(K* kernel, int blocks, int threads, A... args) {
    kernel<<<blocks, threads>>>(args...);
}
