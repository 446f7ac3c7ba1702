// On a CPU everything of this header is in simt.h.
#pragma once
#include "simt.h"
