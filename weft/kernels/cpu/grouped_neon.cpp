#include "weft/kernels/cpu/grouped_vec.h"
