#define PACELINE_KERNEL_NAMESPACE avx2
#include "node/kernels_body.inc"
