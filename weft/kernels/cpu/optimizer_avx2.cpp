#include "weft/kernels/cpu/optimizer_vec.h"
