#pragma once

namespace paceline::shm {

// Precedes each store into shared memory that another rank may wait for, where the loss of a rank
// does most harm. Does nothing except in the build of this layer for tests/shm/protocol_test.
#ifdef PACELINE_FAULT_POINTS
void fault_point();
#else
inline void fault_point() {}
#endif

}  // namespace paceline::shm
