// On a CPU everything of this header that is emulated: simt.h, and the tensor map.
#pragma once
#include "simt/names.h"
#include "simt.h"
#include "simt/tensor_map_types.h"
#include "simt/names_end.h"
