#include "weft/kernels/cpu/gemm_epilogue_vec.h"
