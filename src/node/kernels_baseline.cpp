#define PACELINE_KERNEL_NAMESPACE baseline
#include "node/kernels_body.inc"
